"""Simulates a run of ten days under retention: the size of its store, and the time of its queries.

    python benchmarks/retention.py

The steps of a day are written in bulk as a trainer and its samplers leave them: groups with their
turns, tokens, trainings and shared texts. Then a day passes (the dates of unused blobs are moved),
and the trainer's retention removes what is older than `--retain_steps`, here a day of steps. At the
end of each day, bytes by collection are measured; after the second day and the last, the queries
that a run repeats (those of `growth.py`) are, too, in milliseconds and in keys and documents that the
server examines. The database is a real mongod; only the time is virtual.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from growth import GENERATIONS, Query, least_ms, loops, stored_record
from harness.results import parser, report

from agentrl.config.sections import RootConfig, RunSection, StoreSection
from agentrl.schema import (
    DispatchedSamplingTask,
    LedgerEntry,
    MCPTask,
    RatioStats,
    RecordStatus,
    Run,
    SamplingParams,
    TurnTraining,
    VersionSpan,
    utc_now,
)
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document, to_document
from agentrl.store.documents.packed_turns import ToolsPacker, pack
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod
from agentrl.trainer.rl.old_steps import expire_due

DAYS = 10
GROUPS_A_STEP, TURNS = 4, 2
ADDED_TOKENS, SAMPLED_TOKENS = 200, 100
READY_GROUPS = PENDING_GROUPS = 100
"""After the groups of each day; the measured queries reserve and claim them."""
MEASURED_STEP = 10**6
SYNC_SECONDS = 1
AT_ONCE = f"--syncdelay {SYNC_SECONDS} --setParameter minSnapshotHistoryWindowInSeconds=0"
"""Has a mongod reuse at once what removed documents took. By default it keeps them for snapshot reads of
the last five minutes, and frees their space at its next checkpoint, a minute later: most of these ten
days."""
TOOLS: tuple[Document, ...] = ({"type": "function", "function": {"name": "f", "doc": "x" * 2000}},)


def a_turn(record_id: str, index: int, step: int, rng: np.random.Generator) -> Any:
    """Return a turn of a record, and the question that its group shares."""
    task_id = record_id.rpartition("/")[0]
    question = {"role": "user", "content": f"{task_id}: " + "a long question " * 60}
    return DispatchedSamplingTask(
        id=f"{record_id}/1/{index}",
        record_id=record_id,
        task_id=task_id,
        attempt=1,
        index=index,
        parent=index - 1 if index else None,
        added_ids=rng.integers(0, 2**17, ADDED_TOKENS, dtype=np.int32),
        output_ids=rng.integers(0, 2**17, SAMPLED_TOKENS, dtype=np.int32),
        output_logprobs=-rng.random(SAMPLED_TOKENS, dtype=np.float32),
        version_spans=(VersionSpan(version=step - 1, start=0, end=SAMPLED_TOKENS),),
        added_messages=() if index else (question,),
        tools=() if index else TOOLS,
        output_text="an answer with its reasons " * 15,
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )


def a_training(turn: DispatchedSamplingTask, step: int) -> Document:
    """Return how a step trained a turn."""
    training = TurnTraining(
        id=f"trainer/{step}/{turn.id}",
        consumer="trainer",
        step=step,
        turn_id=turn.id,
        record_id=turn.record_id,
        task_id=turn.task_id,
        position=turn.index,
        num_tokens=SAMPLED_TOKENS,
        num_trained_tokens=SAMPLED_TOKENS,
        advantage=0.5,
        staleness=0,
        ratio=RatioStats(mean=1.0, std=0.1, min=0.5, max=2.0),
    )
    return to_document(training)


def group(
    order: int, step: int | None, *, is_pending: bool = False
) -> Iterator[tuple[str, Document]]:
    """Yield the documents of a group that a step trained, or of one that is ready or pending."""
    task = MCPTask(
        id=f"train/0/q{order}",
        order=order,
        num_generations=GENERATIONS,
        query=f"What does item {order} cost?",
        answer=str(order),
        scorer="exact",
        status="created" if is_pending else "completed",
        completed_at=None if is_pending else utc_now(),
    )
    yield "tasks", to_document(task)
    rng = np.random.default_rng(order)
    packer = ToolsPacker()
    entry = LedgerEntry(status="trained", step=step, trained_at=(step or 0,), trained_count=1)
    for traj_id in range(GENERATIONS):
        record_id = f"{task.id}/{traj_id}"
        facts = {"_id": record_id, "task_id": task.id, "traj_id": traj_id, "order": order}
        status: RecordStatus = "pending" if is_pending else "scored"
        slot, data = stored_record(status, traj_id % 2, retried=False)
        turns = [] if is_pending else [a_turn(record_id, i, step or 1, rng) for i in range(TURNS)]
        ids = [turn.id for turn in turns]
        yield "records", {**slot, **facts, "turns": ids, "group_open": is_pending}
        if is_pending:
            continue
        ledger = {} if step is None else {"trainer": entry.model_dump()}
        yield "record_data", {**data, **facts, "turn_ids": ids, "ledger": ledger}
        for turn in turns:
            document, blobs = pack(turn, packer)
            yield "turns", document
            for blob in blobs:
                yield from (("blobs", part) for part in blob.documents())
            if step is not None:
                yield "turn_training", a_training(turn, step)


async def write(store: TrajectoryStore, groups: Iterator[Iterator[tuple[str, Document]]]) -> None:
    """Insert the documents of groups, blobs once."""
    waiting: dict[str, dict[Any, Document]] = {}
    for number, one in enumerate(groups, 1):
        for name, document in one:
            waiting.setdefault(name, {})[document["_id"]] = document
        if number % 100 == 0:
            await _flush(store, waiting)
    await _flush(store, waiting)


async def _flush(store: TrajectoryStore, waiting: dict[str, dict[Any, Document]]) -> None:
    for name, documents in waiting.items():
        if name == "blobs":
            wanted = {"_id": {"$in": [*documents]}}
            async for known in store.database["blobs"].find(wanted, {"_id": 1}):
                del documents[known["_id"]]
        if documents:
            await store.database[name].insert_many([*documents.values()], ordered=False)
    waiting.clear()


async def forget(store: TrajectoryStore, first_order: int) -> None:
    """Remove the groups that the queries of the day before used."""
    found = store.database["records"].find({"order": {"$gte": first_order}}, {"_id": 1})
    await store.database["turns"].delete_many(
        {"record_id": {"$in": [r["_id"] async for r in found]}}
    )
    for name in ("record_data", "records", "tasks"):
        await store.database[name].delete_many({"order": {"$gte": first_order}})


def queries(store: TrajectoryStore) -> dict[str, Query]:
    """Return those of `growth.py`, without decoding turns, which that run does not have."""

    async def reserve() -> None:
        (ready,) = await store.ledger.ready_groups(limit=1, hydrate=False)
        await store.ledger.reserve("trainer", [data.record_id for data in ready], MEASURED_STEP)

    found = {"ready_groups": lambda: store.ledger.ready_groups(limit=4, hydrate=False)}
    return {**loops(store), **found, "reserve": reserve}


async def examined(store: TrajectoryStore, query: Query) -> int:
    """Return how many keys and documents the server looks at for a query, whatever the load."""
    handle = store.database.handle
    await handle.command("profile", 2)
    await query()
    await handle.command("profile", 0)
    profile = handle["system.profile"]
    found = [one async for one in profile.find({"ns": {"$not": {"$regex": "system"}}})]
    await profile.drop()
    return sum(one.get("keysExamined", 0) + one.get("docsExamined", 0) for one in found)


async def times(store: TrajectoryStore) -> dict[str, Any]:
    """Return the milliseconds of every query, and what the server examines for it."""
    found = queries(store)
    return {
        "loops_ms": {name: await least_ms(query) for name, query in found.items()},
        "loops_examine": {name: await examined(store, query) for name, query in found.items()},
        "read_a_group_ms": await least_ms(lambda: store.ledger.ready_groups(limit=1)),
    }


async def pass_a_day(store: TrajectoryStore) -> None:
    """Move the dates by which retention waits."""
    earlier = {"$subtract": ["$unused_since", timedelta(days=1) // timedelta(milliseconds=1)]}
    await store.database["blobs"].update_many(
        {"unused_since": {"$exists": True}}, [{"$set": {"unused_since": earlier}}]
    )


async def sizes(store: TrajectoryStore) -> dict[str, float]:
    """Return megabytes by collection: documents, files with indexes, and their part for reuse."""
    await asyncio.sleep(2 * SYNC_SECONDS)  # sizes are those of the last checkpoint
    stats = await store.maintenance.stats()
    found = {one.name: one for one in stats.collections}
    old = ("turns", "turn_training", "blobs")
    kept = ("tasks", "records", "record_data")

    def megabytes(names: tuple[str, ...], *fields: str) -> float:
        num_bytes: int = sum(getattr(found[n], f) for n in names for f in fields)
        return round(num_bytes / 2**20, 2)

    files = await store.database.handle.command("dbStats", freeStorage=1)
    return {
        "turns_trainings_blobs_mb": megabytes(old, "data_bytes"),
        "turns_trainings_blobs_on_disk_mb": megabytes(old, "storage_bytes", "index_bytes"),
        "questions_records_ledger_mb": megabytes(kept, "data_bytes"),
        "questions_records_ledger_on_disk_mb": megabytes(kept, "storage_bytes", "index_bytes"),
        "on_disk_mb": round(files["totalSize"] / 2**20, 2),
        "reusable_on_disk_mb": round(files["totalFreeStorageSize"] / 2**20, 2),
        "num_turns": found["turns"].num_documents,
        "num_blobs": found["blobs"].num_documents,
    }


async def simulate(uri: str, output: Path, steps_a_day: int) -> dict[str, Any]:
    """Run all days and return what was measured at the end of each."""
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=store.database_name))
        await store.runs.set_admission(10**9)
        config = RootConfig(
            run=RunSection(run_name=store.database_name, output_dir=output),
            store=StoreSection(retain_steps=steps_a_day),
        )
        days = []
        for day in range(1, DAYS + 1):
            first, last = (day - 1) * steps_a_day + 1, day * steps_a_day
            orders = range((first - 1) * GROUPS_A_STEP, last * GROUPS_A_STEP)
            await forget(store, orders.start)
            await write(store, (group(order, order // GROUPS_A_STEP + 1) for order in orders))
            ready = range(orders.stop, orders.stop + READY_GROUPS)
            pending = range(ready.stop, ready.stop + PENDING_GROUPS)
            await write(store, (group(order, None) for order in ready))
            await write(store, (group(order, None, is_pending=True) for order in pending))
            checkpoint = output / "checkpoints" / f"{last:06d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "state.json").touch()
            await pass_a_day(store)
            (output / "checkpoints" / f"{last - steps_a_day:06d}" / "state.json").unlink(True)
            started = time.monotonic()
            removed = await expire_due(store, config, rest_share=0.0)
            seconds = time.monotonic() - started
            days.append(
                {
                    "day": day,
                    "steps": last,
                    "removed_turns": removed,
                    "retention_ms_a_step": round(1000 * seconds / steps_a_day, 2),
                    **await sizes(store),
                    **(await times(store) if day in (2, DAYS) else {}),
                }
            )
            print(json.dumps(days[-1]), flush=True)
    return {
        "steps": DAYS * steps_a_day,
        "rollouts": DAYS * steps_a_day * GROUPS_A_STEP * GENERATIONS,
        "retain_steps": steps_a_day,
        "slowest_loop_ms": max(max(day.get("loops_ms", {"": 0.0}).values()) for day in days),
        "days": days,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Simulate the run on a separate mongod."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "mongod"
        program.write_text(f'#!/bin/sh\nexec {find_mongod()} "$@" {AT_ONCE}\n')
        program.chmod(0o700)
        os.environ["MONGOD_BINARY"] = str(program)
        with EmbeddedMongo(Path(folder) / "mongo") as mongo:
            output = Path(folder) / "output"
            return asyncio.run(simulate(mongo.uri("retention"), output, given.steps_a_day))


if __name__ == "__main__":
    flags = parser(__doc__, "retention")
    flags.add_argument("--steps_a_day", type=int, default=400, help="optimizer steps of a day")
    report(flags, measure)

"""Compares the store with a bare PyMongo loop that does the same writes, on one mongod.

    python benchmarks/store.py

- claims and turn writes per second with 1, 8 and 32 processes, with one and with eight requests in
  flight in each: `TrajectoryStore` compared with the driver's own calls (same filters, same
  documents, same write concern; the store adds encoding, leases and typed values)
- a trainer's reads per second compared with a bare cursor over the same documents
- stored bytes per distinct token for records of 1 to 200 turns, texts included

Sides alternate, and a figure is the median of the repeats. `--quick` uses small sizes.
"""

import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import bson
import numpy as np
from harness.results import parser, report
from pymongo import AsyncMongoClient, ReturnDocument
from pymongo.write_concern import WriteConcern

from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Record,
    SamplingParams,
    Score,
    ToolCall,
    ToolResult,
    VersionSpan,
)
from agentrl.store import TrajectoryStore
from agentrl.store.documents.expressions import held
from agentrl.store.documents.packed_turns import ToolsPacker, blob_keys, pack
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.store.repositories.records import CLAIM_ORDER, claim_filter, claim_update
from agentrl.store.repositories.turns import record_update

PROCESSES = (1, 8, 32)
IN_FLIGHT = (1, 8)
GENERATIONS = 8
ADMITTED = 10**9
TURNS_A_RECORD = 50
TOOL_CHARS, TOOL_TOKENS, REPLY_CHARS, REPLY_TOKENS = 2000, 500, 400, 100
TURN_COUNTS = (1, 2, 10, 50, 100, 200)
READ_REPEATS = 9


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    seconds: float = 2.0
    repeats: int = 3
    num_slots: int = 12_000
    read_groups: int = 24


QUICK = Sizes(seconds=0.5, repeats=1, num_slots=4_000, read_groups=4)


def make_turn(record: Record, index: int, *, answers: bool = False) -> DispatchedSamplingTask:
    """Return a typical turn of a browsing agent: a call, and 2,000 characters of page.

    The last turn of a rollout `answers` without a call, because no later turn would read its
    results.
    """
    rng = np.random.default_rng(index)
    text = "".join(map(chr, rng.integers(97, 122, REPLY_CHARS)))
    page = "".join(map(chr, rng.integers(97, 122, TOOL_CHARS)))
    full = index * (TOOL_TOKENS + REPLY_TOKENS)
    call = ToolCall(id=f"call_{index}_0", name="browse", arguments={"url": text[:80]})
    return DispatchedSamplingTask(
        id=f"{record.id}/{record.fence}/{index}",
        record_id=record.id,
        task_id=record.task_id,
        attempt=record.attempt,
        index=index,
        parent=index - 1 if index else None,
        shared_len=full,
        added_ids=rng.integers(0, 150_000, TOOL_TOKENS),
        output_ids=rng.integers(0, 150_000, REPLY_TOKENS),
        output_logprobs=-rng.random(REPLY_TOKENS, dtype=np.float32),
        version_spans=(VersionSpan(version=3, start=0, end=REPLY_TOKENS),),
        added_messages=() if index else ({"role": "user", "content": page},),
        output_text=text,
        tool_calls=() if answers else (call,),
        tool_results=() if answers else (ToolResult(call_id=call.id, name="browse", content=page),),
        finish_reason="stop",
        sampling_params=SamplingParams(),
        server="http://10.0.0.1:30000",
    )


def make_tasks(num_slots: int) -> list[MCPTask]:
    """Return tasks with this total number of slots."""
    return [
        MCPTask(
            id=f"train/0/q{number}",
            order=number,
            num_generations=GENERATIONS,
            query=f"question {number}",
            answer=number,
        )
        for number in range(num_slots // GENERATIONS)
    ]


# --- one process ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A work order for a process."""

    work: str
    """`claims` or `turns`."""
    side: str
    """`store` or `bare`."""
    uri: str
    in_flight: int
    seconds: float


def serve(orders: Connection) -> None:
    """Execute orders until the other end hangs up."""
    while True:
        order = orders.recv()
        if order is None:
            return
        orders.send(asyncio.run(rate(order, orders)))


async def rate(order: Order, orders: Connection) -> float:
    """Prepare, wait for the start signal, work, and return the operations per second."""
    async with (
        TrajectoryStore.connect(order.uri) as store,
        AsyncMongoClient[dict[str, Any]](order.uri, tz_aware=True) as client,
    ):
        # One connection per request in flight, opened before the clock starts.
        await asyncio.gather(*(store.runs.get() for _ in range(order.in_flight)))
        await asyncio.gather(*(client.admin.command("ping") for _ in range(order.in_flight)))
        database = client.get_default_database(write_concern=WriteConcern(w="majority", j=True))
        loops: Sequence[Callable[[], Awaitable[None]]]
        owner = f"bench:{os.getpid()}:0"
        if order.work == "claims":
            loops = [claims(order.side, store, database, owner)] * order.in_flight
        else:
            records = [await claim(store, owner) for _ in range(order.in_flight * 4)]
            share = [records[number :: order.in_flight] for number in range(order.in_flight)]
            loops = [turns(order.side, store, database, slots) for slots in share]
        orders.send("ready")
        await asyncio.to_thread(orders.recv)
        started = time.monotonic()

        async def work(step: Callable[[], Awaitable[None]]) -> int:
            number = 0
            while time.monotonic() < started + order.seconds:
                await step()
                number += 1
            return number

        count = sum(await asyncio.gather(*map(work, loops)))
        return count / (time.monotonic() - started)


async def claim(store: TrajectoryStore, owner: str) -> Record:
    """Claim the next slot, which must exist."""
    claimed = await store.records.claim(
        owner, lease_seconds=600, admitted_groups=ADMITTED, max_attempts=5
    )
    assert claimed is not None, "the benchmark ran out of slots"
    return claimed[0]


def claims(
    side: str, store: TrajectoryStore, database: Any, owner: str
) -> Callable[[], Awaitable[None]]:
    """Return a function that claims once, through the store or the bare driver."""

    async def by_store() -> None:
        await claim(store, owner)

    async def bare() -> None:
        found = await database["records"].find_one_and_update(
            claim_filter(ADMITTED, None),
            claim_update(owner, 600),
            sort=CLAIM_ORDER,
            return_document=ReturnDocument.AFTER,
        )
        assert found is not None, "the benchmark ran out of slots"

    return by_store if side == "store" else bare


def turns(
    side: str, store: TrajectoryStore, database: Any, records: list[Record]
) -> Callable[[], Awaitable[None]]:
    """Return a function that writes one turn, through the store or the bare driver.

    The sampler's input (the turn) is created before the clock starts; so is, on the bare side, its
    document.
    """
    templates = [make_turn(records[0], index) for index in range(1, TURNS_A_RECORD + 1)]
    tools = ToolsPacker()
    packed = [pack(turn, tools)[0] for turn in templates]
    number = 0

    def place() -> tuple[Record, int, str]:
        nonlocal number
        record, index = records[number // TURNS_A_RECORD % len(records)], number % TURNS_A_RECORD
        number += 1
        return record, index, f"{record.id}/{record.fence}/{number}"

    async def by_store() -> None:
        record, index, turn_id = place()
        turn = templates[index].model_copy(update={"id": turn_id, "record_id": record.id})
        await store.turns.append(turn, record.fence)

    async def bare() -> None:
        record, index, turn_id = place()
        await database["turns"].insert_one({**packed[index], "_id": turn_id})
        turn = templates[index].model_copy(update={"id": turn_id, "record_id": record.id})
        result = await database["records"].update_one(
            {**held(record.id, record.fence), "status": "running", "turns": {"$ne": turn_id}},
            record_update(turn),
        )
        assert result.matched_count == 1

    return by_store if side == "store" else bare


# --- all processes ----------------------------------------------------------------------------


class Fleet:
    """Processes that wait for orders."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(number):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=serve, args=(child_end,), daemon=True)
            process.start()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def do(self, order: Order) -> float:
        """Have all processes execute an order at the same time; return the sum of their rates."""
        for pipe in self._pipes:
            pipe.send(order)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"
        for pipe in self._pipes:
            pipe.send("go")
        return float(sum(pipe.recv() for pipe in self._pipes))

    def end(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(20)


def fresh(mongo: EmbeddedMongo, name: str, num_slots: int) -> str:
    """Make a database with slots to claim; return its URI."""

    async def prepare() -> None:
        async with TrajectoryStore.connect(mongo.uri(name)) as store:
            await store.drop_database()
            await store.ensure_schema()
            await store.tasks.add(make_tasks(num_slots))

    asyncio.run(prepare())
    return mongo.uri(name)


def write_rates(mongo: EmbeddedMongo, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure claims and turn writes per second, both sides, by processes and requests in flight."""
    rows = []
    for number in PROCESSES:
        fleet = Fleet(number)
        for work, in_flight in product(("claims", "turns"), IN_FLIGHT):
            rates: dict[str, list[float]] = {"bare": [], "store": []}
            for repeat in range(sizes.repeats):
                for side in ("bare", "store") if repeat % 2 == 0 else ("store", "bare"):
                    uri = fresh(mongo, "rates", sizes.num_slots)
                    rates[side].append(fleet.do(Order(work, side, uri, in_flight, sizes.seconds)))
            bare, store = (median(rates[side]) for side in ("bare", "store"))
            row = {
                "work": work,
                "processes": number,
                "in_flight": in_flight,
                "bare_per_second": round(bare, 1),
                "store_per_second": round(store, 1),
                "ratio": round(store / bare, 3),
            }
            print(row, flush=True)
            rows.append(row)
        fleet.end()
    return rows


async def read_rate(mongo: EmbeddedMongo, sizes: Sizes) -> dict[str, Any]:
    """Measure a trainer's reads per second against a bare cursor over the same documents."""
    async with TrajectoryStore.connect(mongo.uri("reads")) as store:
        await store.ensure_schema()
        await store.tasks.add(make_tasks(sizes.read_groups * GENERATIONS))
        for _ in range(sizes.read_groups * GENERATIONS):
            await play(store, 10)
        num_bytes = 0
        rates: dict[str, list[float]] = {"bare": [], "store": []}
        for _ in range(READ_REPEATS):
            gc.collect()
            started = time.monotonic()
            data = [d async for d in store.database["record_data"].find({}).sort("traj_id", 1)]
            ids = [turn_id for d in data for turn_id in d["turn_ids"]]
            found = [d async for d in store.database["turns"].find({"_id": {"$in": ids}})]
            keys = {key for document in found for key in blob_keys(document)}
            blobs = [d async for d in store.database["blobs"].find({"_id": {"$in": sorted(keys)}})]
            bare = time.monotonic() - started
            num_turns = len(found)
            num_bytes = sum(len(bson.encode(d)) for d in (*data, *found, *blobs))
            # The collector would pass over these documents during the store's reads.
            del data, found, blobs
            gc.collect()
            started = time.monotonic()
            groups = await store.ledger.ready_groups(limit=sizes.read_groups)
            by_store = time.monotonic() - started
            assert sum(len(d.turns) for group in groups for d in group) == num_turns
            del groups
            rates["bare"].append(num_bytes / bare)
            rates["store"].append(num_bytes / by_store)
        await store.drop_database()
    bare_rate, store_rate = (median(rates[side]) for side in ("bare", "store"))
    return {
        "megabytes": round(num_bytes / 1e6, 1),
        "bare_megabytes_per_second": round(bare_rate / 1e6, 1),
        "store_megabytes_per_second": round(store_rate / 1e6, 1),
        "ratio": round(store_rate / bare_rate, 3),
    }


# --- bytes --------------------------------------------------------------------------------------


async def play(store: TrajectoryStore, num_turns: int) -> Record:
    """Run one slot up to its score."""
    record = await claim(store, "bench:0:0")
    for index in range(num_turns):
        turn = make_turn(record, index, answers=index == num_turns - 1)
        await store.turns.append(turn, record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="1", lease_seconds=600
    )
    await store.scores.set(record.id, record.fence, Score(scorer="exact", value=1.0))
    played = await store.records.get(record.id)
    assert played is not None
    return played


async def bytes_per_token(mongo: EmbeddedMongo) -> list[dict[str, Any]]:
    """Measure stored bytes per distinct token, texts included."""
    rows = []
    for num_turns in TURN_COUNTS:
        async with TrajectoryStore.connect(mongo.uri("bytes")) as store:
            await store.drop_database()
            await store.ensure_schema()
            await store.tasks.add(
                [make_tasks(GENERATIONS)[0].model_copy(update={"num_generations": 1})]
            )
            record = await play(store, num_turns)
            tokens = record.num_prompt_tokens + record.num_output_tokens
            stored = 0
            for name in ("records", "record_data", "turns", "blobs"):
                cursor = await store.database[name].aggregate(
                    [{"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}]
                )
                stored += sum([row["bytes"] async for row in cursor])
            await store.drop_database()
        per_token = round(stored / tokens, 2)
        rows.append({"turns": num_turns, "tokens": tokens, "bytes_per_token": per_token})
    return rows


# --- the whole ----------------------------------------------------------------------------------


def measure(sizes: Sizes) -> dict[str, Any]:
    """Run everything on a separate mongod."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        by_turns = asyncio.run(bytes_per_token(mongo))
        rates = write_rates(mongo, sizes)
        reads = asyncio.run(read_rate(mongo, sizes))

    def ratio(work: str) -> float:
        return min(
            float(row["ratio"]) for row in rates if (row["work"], row["processes"]) == (work, 8)
        )

    return {
        "claims_ratio": ratio("claims"),
        "turn_writes_ratio": ratio("turns"),
        "bytes_per_token_200_turns": by_turns[-1]["bytes_per_token"],
        "reads_ratio": reads["ratio"],
        "writes": rates,
        "trainer_reads": reads,
        "bytes_per_token": by_turns,
    }


if __name__ == "__main__":
    flags = parser(__doc__, "store")
    flags.add_argument("--quick", action="store_true", help="small sizes, for a quick check only")
    report(flags, lambda given: measure(QUICK if given.quick else Sizes()))

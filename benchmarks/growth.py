"""Measures how the duration of a run's queries grows from ten thousand to a million records.

    python benchmarks/growth.py

A run in the middle of training is written in bulk: most groups trained, some ready and running, the
others pending, with occasional evaluation questions. Measured on it, at each size:

- queries in loops: those of a waiting trainer, a sampler and the display
- queries behind the pages of `agentrl inspect` and `agentrl tasks stats`
- adding as many questions as there are records, with one record each, in a separate process: seconds
  and memory

A figure is the shortest repeat in milliseconds, because other work on the machine only adds time.
`--quick` stays at twenty thousand records.
"""

import asyncio
import functools
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from harness.apart import Meter, apart
from harness.results import parser, report
from pymongo import AsyncMongoClient

from agentrl.config.sections import DataSection
from agentrl.datasets.task_stream import append_tasks, train_tasks
from agentrl.schema import (
    Attempt,
    LedgerEntry,
    MCPTask,
    Record,
    RecordStatus,
    Run,
    SamplerInfo,
    Score,
    utc_now,
)
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document, record_data, record_to_document, to_document
from agentrl.store.private_mongod import EmbeddedMongo

SIZES = (10_000, 100_000, 1_000_000)
GENERATIONS = 8
PENDING_SHARE = 0.2
NUM_READY, NUM_RUNNING = 32, 32
"""Groups between those that are trained and those that are pending."""
EVAL_QUESTIONS, GROUPS_AN_EVALUATION = 50, 5_000
FAILED_EVERY, RETRIED_EVERY = 500, 100
NUM_SAMPLERS = 64
REPEATS = 15
BATCH = 5_000
LEASE_SECONDS = 600.0

Query = Callable[[], Awaitable[Any]]


# --- the run ----------------------------------------------------------------------------------


def make_task(number: int, num_groups: int) -> MCPTask:
    """Return a training task in the state that belongs to its place in the stream."""
    is_open = number >= num_groups * (1 - PENDING_SHARE) - NUM_RUNNING
    return MCPTask(
        id=f"train/0/q{number}",
        order=number,
        num_generations=GENERATIONS,
        query=f"What does item {number} cost, and where is it sold?",
        answer=str(number),
        scorer="exact",
        status="created" if is_open else "completed",
        completed_at=None if is_open else utc_now(),
    )


@functools.cache
def stored_record(status: RecordStatus, value: int, *, retried: bool) -> tuple[Document, Document]:
    """Return the common fields of such records' documents: the slot's and the trainer's."""
    ended = status != "pending"
    attempt = Attempt(attempt=1, fence=1, owner="host:1:0", started_at=utc_now())
    finished = attempt.model_copy(update={"ended_at": utc_now(), "ended_by": "finished"})
    expired = attempt.model_copy(update={"ended_by": "expired", "error": "its lease expired"})
    record = Record(
        id="",
        task_id="",
        split="train",
        traj_id=0,
        order=0,
        status=status,
        attempt=int(ended),
        fence=1 + retried if ended else 0,
        attempts=((expired, finished) if retried else (finished,)) if ended else (),
        outcome="answered" if status == "scored" else None,
        final_answer="7" if status == "scored" else None,
        score=Score(scorer="exact", value=value) if status == "scored" else None,
        num_prompt_tokens=100 if ended else 0,
        num_output_tokens=50 if ended else 0,
        error="no server" if status == "failed" else None,
        started_at=utc_now() if ended else None,
        finished_at=utc_now() if ended else None,
    )
    data = record_data(record, "0" * 16).model_copy(update={"group_completed": True})
    return record_to_document(record), to_document(data)


def statuses(task: MCPTask) -> list[RecordStatus]:
    """Return the statuses of a task's records."""
    if task.status == "created":
        return ["pending"] * GENERATIONS
    first = abs(task.order) * GENERATIONS
    return [
        "failed" if number % FAILED_EVERY == 1 else "scored"
        for number in range(first, first + GENERATIONS)
    ]


def tasks_of_run(num_groups: int) -> Iterator[MCPTask]:
    """Yield all tasks, evaluations among them."""
    for number in range(num_groups):
        if number % GROUPS_AN_EVALUATION == 0:
            name = f"eval@{number}"
            for question in range(EVAL_QUESTIONS):
                task = make_task(question, num_groups=10**9)
                changes = {"id": f"eval/{number}/q{question}", "split": "eval", "tag": name}
                yield task.model_copy(update={**changes, "order": question - EVAL_QUESTIONS})
        yield make_task(number, num_groups)


def documents(num_groups: int) -> Iterator[tuple[str, Document]]:
    """Yield the documents of the run with their collections."""
    trained_groups = int(num_groups * (1 - PENDING_SHARE)) - NUM_RUNNING - NUM_READY
    for task in tasks_of_run(num_groups):
        yield "tasks", to_document(task)
        step = task.order // 8 + 1
        entry = LedgerEntry(status="trained", step=step, trained_at=(step,), trained_count=1)
        is_trained = 0 <= task.order < trained_groups
        ledger = {"trainer": entry.model_dump()} if is_trained else {}
        for traj_id, status in enumerate(statuses(task)):
            number = task.order * GENERATIONS + traj_id
            slot, data = stored_record(status, number % 2, retried=number % RETRIED_EVERY == 0)
            facts = {"_id": f"{task.id}/{traj_id}", "task_id": task.id, "traj_id": traj_id}
            facts |= {"split": task.split, "order": task.order}
            if task.status == "created":
                yield "records", {**slot, **facts, "group_open": True}
            else:
                yield "records", {**slot, **facts}
                yield "record_data", {**data, **facts, "ledger": ledger}


async def write_run(
    uri: str, num_records: int, found: Iterator[tuple[str, Document]] | None = None
) -> None:
    """Write a run of `num_records` training records, and create its indexes.

    Args:
        uri: connection string of an empty database.
        num_records: training records.
        found: the documents, if they differ from those of `documents`.
    """
    num_groups = num_records // GENERATIONS
    async with AsyncMongoClient[Document](uri) as client:
        database = client.get_default_database()
        left = documents(num_groups) if found is None else found
        while batch := list(islice(left, BATCH)):
            for name in dict.fromkeys(collection for collection, _ in batch):
                of_one = [document for collection, document in batch if collection == name]
                if of_one:
                    await database[name].insert_many(of_one, ordered=False)
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=store.database_name, policy_version=num_groups // 8))
        await store.runs.set_admission(int(num_groups * (1 - PENDING_SHARE)))
        for number in range(NUM_SAMPLERS):
            info = SamplerInfo(id=f"host:1:{number}", host="host", pid=1, num_output_tokens=1000)
            await store.samplers.register(info)
        for _ in range(NUM_RUNNING * GENERATIONS // 2):
            await claim(store)


async def claim(store: TrajectoryStore) -> Record:
    """Claim the next slot."""
    claimed = await store.records.claim(
        "host:1:0", lease_seconds=LEASE_SECONDS, admitted_groups=10**9, max_attempts=5
    )
    assert claimed is not None
    return claimed[0]


# --- measurements -------------------------------------------------------------------------


def loops(store: TrajectoryStore) -> dict[str, Query]:
    """Return the queries that run many times a minute during a run."""
    step = 10**6

    async def reserve() -> None:
        (group,) = await store.ledger.ready_groups(limit=1)
        await store.ledger.reserve("trainer", [data.record_id for data in group], step)

    async def commit() -> None:
        await store.ledger.commit("trainer", step)

    return {
        "first_open_order": store.tasks.first_open_order,
        "is_exhausted": store.ledger.is_exhausted,
        "ready_groups": lambda: store.ledger.ready_groups(limit=4),
        "reserve": reserve,
        "commit": commit,
        "claim": lambda: claim(store),
        "reap": lambda: store.groups.reap(5, lease_seconds=LEASE_SECONDS),
        "next_train_order": store.tasks.next_train_order,
        "progress": store.reports.progress,
        "missing_scores": store.reports.missing_scores,
        "eval_completed": lambda: store.tasks.count(tag="eval@0", status="completed"),
    }


def pages(store: TrajectoryStore) -> dict[str, Query]:
    """Return the queries behind the pages that users open."""
    return {
        "runs": store.reports.summary,
        "progress": lambda: store.reports.overview("trainer"),
        "failures": lambda: store.reports.failures(50),
        "samplers": store.reports.processes,
        "record": lambda: store.reports.record_detail("train/0/q7/3"),
        "step": lambda: store.lineage.of_step(5),
        "tasks_stats": store.reports.by_split,
    }


async def least_ms(query: Query) -> float:
    """Return the shortest repeat; the first, which fills caches, does not count."""
    await query()
    seconds = []
    for _ in range(REPEATS):
        started = time.monotonic()
        await query()
        seconds.append(time.monotonic() - started)
    return round(1000 * min(seconds), 2)


async def measure_queries(uri: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of every query."""
    async with TrajectoryStore.connect(uri) as store:
        return {
            "loops_ms": {name: await least_ms(query) for name, query in loops(store).items()},
            "pages_ms": {name: await least_ms(query) for name, query in pages(store).items()},
        }


# --- adding questions -------------------------------------------------------------------------


async def add_questions(meter: Meter, uri: str, path: Path) -> dict[str, Any]:
    """Add all questions of a file to an empty run."""
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        data = DataSection(train_file=path, num_generations=1, num_train_epochs=1)
        with meter:
            await append_tasks(store, train_tasks(data, seed=0))
        await store.drop_database()
        return {}


def measure_adding(mongo: EmbeddedMongo, folder: Path, num_questions: int) -> dict[str, float]:
    """Return seconds and megabytes of adding a number of questions."""
    path = folder / "questions.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_questions):
            question = {"id": f"q{number}", "query": f"What is {number} + 1?", "answer": number + 1}
            file.write(json.dumps(question) + "\n")
    return apart(add_questions, mongo.uri("adding"), path)


# --- everything --------------------------------------------------------------------------------


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure every size on a separate mongod."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedMongo(Path(folder) / "mongo") as mongo,
        ):
            asyncio.run(write_run(mongo.uri("growth"), size))
            queries = asyncio.run(measure_queries(mongo.uri("growth")))
            adding = measure_adding(mongo, Path(folder), size)
            rows.append({"records": size, **queries, "adding": adding})
            print(json.dumps(rows[-1]), flush=True)
    last = rows[-1]
    return {
        "records": last["records"],
        "slowest_loop_ms": max(last["loops_ms"].values()),
        "slowest_page_ms": max(last["pages_ms"].values()),
        "sizes": rows,
    }


if __name__ == "__main__":
    flags = parser(__doc__, "growth")
    flags.add_argument("--quick", action="store_true", help="small sizes, for a quick check only")
    report(flags, lambda given: measure((2_000, 20_000) if given.quick else SIZES))

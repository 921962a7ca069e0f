"""How much of a run is done, without counting the run.

Only what is open (in flight, failed, or of an evaluation) is counted, over indexes; the rest of a
training run, which may have millions of records, is what remains of the collections' sizes. The
counts are taken one after another while the run continues, so they may be briefly inexact.
"""

import asyncio
from collections.abc import Sequence
from typing import get_args

from pymongo.asynchronous.collection import AsyncCollection

from agentrl.schema import RECORD_TRANSITIONS, TERMINAL_STATUSES, RecordStatus, Split
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document

MEAN_OF = 4096
"""Scored records that a mean is computed from, the last ones."""
COUNTED = 20_000
"""Documents that are counted one by one, in about 10 ms."""
_TRAINING: Document = {"$gte": 0}
_EVALUATION: Document = {"$lt": 0}
"""Of `order`, whose sign distinguishes the two."""
_ENDED_OF_OPEN: Document = {"group_open": True, "status": {"$in": sorted(TERMINAL_STATUSES)}}


class SplitCounts(Value):
    """Counts of one split."""

    num_groups: int
    num_completed: int
    num_scored: int
    num_failed: int
    mean_score: float | None
    """Of training, over the last `MEAN_OF` scored records."""


async def read_training_groups(database: RunDatabase) -> tuple[int, int]:
    """Return the number of training groups, and of the completed ones."""
    # Orders are consecutive, and only groups in flight are open below the last completed one.
    found: list[int] = []
    for wanted in ({"split": "train"}, {"split": "train", "status": "completed"}):
        last = await database.tasks.find_one(wanted, {"order": 1}, sort=[("order", -1)])
        found.append(0 if last is None else int(last["order"]) + 1)
    num_groups, end = found
    is_open = {"split": "train", "status": "created", "order": {"$lt": end}}
    return num_groups, end - await database.tasks.count_documents(is_open)


async def read_record_counts(
    database: RunDatabase,
) -> tuple[dict[RecordStatus, int], dict[RecordStatus, int]]:
    """Return the numbers of training and of evaluation records by status; zeros are left out."""
    active: Sequence[RecordStatus] = ("running", "finished", "failed")
    (evaluation, training), num_records, num_of_complete, num_ended_of_open = await asyncio.gather(
        asyncio.gather(
            _by_status(database, [*RECORD_TRANSITIONS], _EVALUATION),
            _by_status(database, active, _TRAINING),
        ),
        _size(database.records),
        _size(database.record_data),
        database.records.count_documents(_ENDED_OF_OPEN),
    )
    num_ended = num_of_complete + num_ended_of_open - evaluation["scored"] - evaluation["failed"]
    num_training = num_records - sum(evaluation.values())
    training["scored"] = max(0, num_ended - training["failed"])
    evaluation["pending"] += evaluation.pop("planned")
    training["pending"] = max(0, num_training - sum(training.values()))
    return _shown(training), _shown(evaluation)


async def _size(collection: AsyncCollection[Document]) -> int:
    """Return the number of documents, counted as long as that is quick.

    What the server keeps of a large collection's size misses the last minute's writes after a crash.
    """
    counted = await collection.count_documents({}, limit=COUNTED, hint="_id_")
    return counted if counted < COUNTED else await collection.estimated_document_count()


async def _by_status(
    database: RunDatabase, statuses: Sequence[RecordStatus], order: Document
) -> dict[RecordStatus, int]:
    # One status per query: the server then counts keys of the index without reading them out.
    counts = [
        await database.records.count_documents({"status": status, "order": order})
        for status in statuses
    ]
    return dict(zip(statuses, counts, strict=True))


def _shown(counts: dict[RecordStatus, int]) -> dict[RecordStatus, int]:
    statuses = [status for status in RECORD_TRANSITIONS if counts.get(status)]
    return {status: counts[status] for status in statuses}


async def read_split_counts(database: RunDatabase) -> dict[Split, SplitCounts]:
    """Return the counts of every split that has tasks."""
    splits: list[Split] = [split for split in get_args(Split) if split != "train"]
    tasks, records = await asyncio.gather(
        database.aggregate(
            database.tasks,
            [
                {"$match": {"split": {"$in": splits}}},
                {"$group": {"_id": {"split": "$split", "status": "$status"}, "num": {"$sum": 1}}},
            ],
        ),
        database.aggregate(
            database.records,
            [
                {"$match": {"status": {"$in": sorted(TERMINAL_STATUSES)}, "order": _EVALUATION}},
                {
                    "$group": {
                        "_id": {"split": "$split", "status": "$status"},
                        "num": {"$sum": 1},
                        "mean": {"$avg": "$score.value"},
                    }
                },
            ],
        ),
    )
    groups = {(one["_id"]["split"], one["_id"]["status"]): one["num"] for one in tasks}
    ended = {(one["_id"]["split"], one["_id"]["status"]): one for one in records}
    found: dict[Split, SplitCounts] = {}
    training, _ = await read_record_counts(database)
    num_groups, num_completed = await read_training_groups(database)
    if num_groups:
        found["train"] = SplitCounts(
            num_groups=num_groups,
            num_completed=num_completed,
            num_scored=training.get("scored", 0),
            num_failed=training.get("failed", 0),
            mean_score=await mean_score(database),
        )
    for split in splits:
        num_completed = groups.get((split, "completed"), 0)
        num_groups = num_completed + groups.get((split, "created"), 0)
        if num_groups:
            scored = ended.get((split, "scored"), {})
            found[split] = SplitCounts(
                num_groups=num_groups,
                num_completed=num_completed,
                num_scored=scored.get("num", 0),
                num_failed=ended.get((split, "failed"), {}).get("num", 0),
                mean_score=scored.get("mean"),
            )
    return found


async def mean_score(database: RunDatabase) -> float | None:
    """Return the mean over the last `MEAN_OF` scored training records."""
    scored: Document = {"status": "scored", "order": _TRAINING}
    found = await database.aggregate(
        database.records,
        [
            {"$match": scored},
            {"$sort": {"order": -1, "traj_id": -1}},
            {"$limit": MEAN_OF},
            {"$group": {"_id": None, "mean": {"$avg": "$score.value"}}},
        ],
    )
    return found[0]["mean"] if found else None

"""Stored counts over spans of `order`, which avoid counting a whole run.

A tally covers the Tasks, and their Records, of `SPAN` orders from `_id * SPAN`:

    {_id, version, writers, added: {split: {num_groups, num_records}},
     ended: {split: {num_scored, num_failed, score_sum}}}

`added` changes when Tasks are added. `ended` exists once all Tasks are complete, and changes when a
score is repaired. A process that makes such a change is listed in `writers` during the change
(`changing`), which removes both counts. Counting stores no result if a writer is listed or
`version` has changed. A stored count therefore always equals a fresh count. A writer that died
stays listed, so its span is counted at every query. A further document states that every span has
its tally (`prepare`); without it, everything is counted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any, Literal, get_args

from pymongo import UpdateOne

from agentrl.schema import RECORD_TRANSITIONS, Split
from agentrl.schema.base import Value
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.writes import insert_new

SPAN = 512
"""Orders per tally: few tallies for many groups, and few Records in a span that is still open."""
SEALED_AT_ONCE = 16
_READ_BATCH = 10_000
"""Batch size of replies: more tallies than a long run has, so that one reply holds them all. By
default, the first reply would end after 101 documents."""
_WHOLE = "whole"
_EVERYTHING = ((-(2**62), 0), (0, 2**62))
_ALL_STATUSES = sorted(RECORD_TRANSITIONS)
_SPLITS: list[Split] = list(get_args(Split))

_Range = tuple[int, int]
"""Orders from the first up to but excluding the second; all of one sign."""


class SplitCounts(Value):
    """Counts of one split."""

    num_groups: int = 0
    num_completed: int = 0
    num_records: int = 0
    num_scored: int = 0
    num_failed: int = 0
    score_sum: float = 0.0

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored records."""
        return self.score_sum / self.num_scored if self.num_scored else None


class RecordCounts(Value):
    """Counts of training or of evaluation records, distinguished by the sign of their `order`."""

    num_records: int = 0
    num_scored: int = 0
    num_failed: int = 0


class Standing(Value):
    """Progress of a run, without the rapidly changing counts of running and finished records."""

    num_groups: int
    """Training groups."""
    num_completed: int
    training: RecordCounts
    evaluation: RecordCounts


class _Tallies:
    """All tallies that were read, summed in one pass because a long run has hundreds."""

    def __init__(self, documents: Iterable[Document], *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._missing: dict[str, list[int]] = {"added": [], "ended": []}
        self._sums: Counter[tuple[int, str, str]] = Counter()
        """Keyed by the sign of the orders, split and field."""
        for one in documents:
            sign = -1 if one["_id"] < 0 else 1
            for part, missing in self._missing.items():
                if part not in one:
                    missing.append(one["_id"])
                    continue
                for split, counts in one[part].items():
                    for field, value in counts.items():
                        self._sums[sign, split, field] += value
            if "ended" in one:
                for split, counts in one["added"].items():
                    self._sums[sign, split, "num_completed"] += counts["num_groups"]

    def ranges_without(self, counts: Literal["added", "ended"]) -> list[_Range]:
        """Return the orders that must be counted."""
        return _ranges(self._missing[counts]) if self._is_whole else list(_EVERYTHING)

    def total(self, field: str, *, split: Split | None = None, sign: int = 0) -> Any:
        """Return the sum of a field over the tallies that have it.

        `num_completed` is the number of groups in spans that have ended.
        """
        return sum(
            value
            for (of_sign, of_split, name), value in self._sums.items()
            if name == field and sign in (0, of_sign) and split in (None, of_split)
        )


class TallyRepository(Repository):
    """Maintains the tallies, and counts the spans without stored counts."""

    def __init__(self, database: RunDatabase) -> None:
        super().__init__(database)
        self._is_prepared = False

    @asynccontextmanager
    async def changing(self, orders: Collection[int], writer: str) -> AsyncIterator[None]:
        """Remove the counts of these orders while a score is repaired; see `begin_change`."""
        await self.begin_change(orders, writer)
        yield
        await self.end_change(orders, writer)

    async def begin_change(self, orders: Collection[int], writer: str) -> None:
        """Remove the counts of these orders until `end_change`.

        Runs inside an operation; a repeated one passes the same `writer`.
        """
        if not orders:
            return
        if not self._is_prepared:
            await self.prepare()
        change: Document = {
            "$addToSet": {"writers": writer},
            "$inc": {"version": 1},
            "$unset": {"added": "", "ended": ""},
        }
        await self._db.tallies.bulk_write(
            [UpdateOne({"_id": number}, change, upsert=True) for number in _numbers(orders)],
            ordered=False,
        )

    async def end_change(self, orders: Collection[int], writer: str) -> None:
        """Allow these orders to be counted again, unless another writer is changing them."""
        await self._db.tallies.update_many(
            {"_id": {"$in": _numbers(orders)}}, {"$pull": {"writers": writer}}
        )

    @operation("prepare the tallies")
    async def prepare(self) -> None:
        """Create missing tallies: databases of earlier releases and imports have none."""
        tallies = self._db.tallies
        if await tallies.find_one({"_id": _WHOLE}) is None:
            number: Document = {"$toLong": {"$floor": {"$divide": ["$order", SPAN]}}}
            found = await self._db.aggregate(self._db.tasks, [{"$group": {"_id": number}}])
            await insert_new(tallies, [{**one, "version": 0, "writers": []} for one in found])
            await insert_new(tallies, [{"_id": _WHOLE}])
        self._is_prepared = True

    @operation("count ended spans")
    async def seal(self) -> int:
        """Store the counts of spans that no longer change; return how many were stored.

        Any number of processes may call it concurrently.
        """
        run = await self._db.runs.find_one({}, {"admitted_groups": 1})
        reached = run["admitted_groups"] // SPAN if run else 0
        new = self._db.tallies.find({"added": None, "writers": []}, {"_id": 1})
        open_ = self._db.tallies.find(
            {"added": {"$ne": None}, "ended": None, "writers": [], "_id": {"$lte": reached}},
            {"_id": 1},
        )
        numbers = [
            one["_id"]
            for cursor in (new, open_)
            for one in await cursor.sort("_id", 1).limit(SEALED_AT_ONCE).to_list()
        ]
        return await self._store_counts(numbers)

    async def count_added(self, orders: Collection[int]) -> None:
        """Store the counts of the spans to which Tasks were added; runs inside an operation."""
        await self._store_counts(_numbers(orders))

    async def _store_counts(self, numbers: Sequence[int]) -> int:
        """Count spans and store the counts in one write; return how many were stored."""
        counted = [await self._counted(number) for number in numbers]
        changes = [change for change in counted if change is not None]
        if not changes:
            return 0
        return (await self._db.tallies.bulk_write(changes, ordered=False)).modified_count

    async def _counted(self, number: int) -> UpdateOne | None:
        """Return the change that stores the counts of a span; None if there is nothing to store."""
        tally = await self._db.tallies.find_one({"_id": number})
        if tally is None or tally["writers"]:
            return None
        span = (number * SPAN, (number + 1) * SPAN)
        is_open = await self._is_open(span)
        if is_open and "added" in tally:
            return None
        counts: Document = {"added": await self._count_added([span])}
        if not is_open:
            counts["ended"] = await self._count_ended([span])
        return UpdateOne(
            {"_id": number, "version": tally["version"], "writers": []}, {"$set": counts}
        )

    async def _is_open(self, span: _Range) -> bool:
        found = await self._db.tasks.find_one(
            {"split": {"$in": _SPLITS}, "status": "created", "order": _within(span)}, {"_id": 1}
        )
        return found is not None

    async def _count_added(self, ranges: Sequence[_Range]) -> dict[str, Document]:
        counts = {"num_groups": {"$sum": 1}, "num_records": {"$sum": "$num_generations"}}
        found = []
        for orders in ranges:
            wanted = {"split": {"$in": _SPLITS}, "order": _within(orders)}
            stages: list[Document] = [{"$match": wanted}, {"$group": {"_id": "$split", **counts}}]
            found += await self._db.aggregate(self._db.tasks, stages)
        return _by_split(found)

    async def _count_ended(self, ranges: Sequence[_Range]) -> dict[str, Document]:
        counts = {
            "num_scored": {"$sum": {"$cond": [{"$eq": ["$status", "scored"]}, 1, 0]}},
            "num_failed": {"$sum": {"$cond": [{"$eq": ["$status", "failed"]}, 1, 0]}},
            "score_sum": {"$sum": "$score.value"},
        }
        found = []
        for orders in ranges:
            wanted = {"status": {"$in": ["failed", "scored"]}, "order": _within(orders)}
            stages: list[Document] = [{"$match": wanted}, {"$group": {"_id": "$split", **counts}}]
            found += await self._db.aggregate(self._db.records, stages)
        return _by_split(found)

    async def _count_completed(self, split: Split, ranges: Sequence[_Range]) -> int:
        wanted = {"split": split, "status": "completed"}
        tasks = self._db.tasks
        return sum([await tasks.count_documents({**wanted, "order": _within(r)}) for r in ranges])

    async def _count_records(self, statuses: Sequence[str], ranges: Sequence[_Range]) -> int:
        # One status per query: the server then counts keys of the index without reading them out.
        return sum(
            [
                await self._db.records.count_documents({"status": status, "order": _within(orders)})
                for status in statuses
                for orders in ranges
            ]
        )

    async def _read(self) -> _Tallies:
        tallies = self._db.tallies.find({}, shown("added", "ended")).sort("_id", 1)
        found = await tallies.batch_size(_READ_BATCH).to_list()
        spans = [one for one in found if one["_id"] != _WHOLE]
        is_whole = len(spans) < len(found)
        return _Tallies(spans if is_whole else [], is_whole=is_whole)

    async def standing(self) -> Standing:
        """Return the run's progress; runs inside an operation."""
        tallies = await self._read()
        new, num_completed, training, evaluation = await asyncio.gather(
            self._count_added(tallies.ranges_without("added")),
            self._count_completed("train", tallies.ranges_without("ended")),
            self._records(tallies, 1),
            self._records(tallies, -1),
        )
        return Standing(
            num_groups=tallies.total("num_groups", split="train")
            + new.get("train", {}).get("num_groups", 0),
            num_completed=tallies.total("num_completed", split="train") + num_completed,
            training=training,
            evaluation=evaluation,
        )

    async def _records(self, tallies: _Tallies, sign: Literal[-1, 1]) -> RecordCounts:
        new, open_ = (
            [orders for orders in tallies.ranges_without(part) if (orders[0] < 0) == (sign < 0)]
            for part in ("added", "ended")
        )
        num_records, num_scored, num_failed = await asyncio.gather(
            self._count_records(_ALL_STATUSES, new),
            self._count_records(["scored"], open_),
            self._count_records(["failed"], open_),
        )
        return RecordCounts(
            num_records=tallies.total("num_records", sign=sign) + num_records,
            num_scored=tallies.total("num_scored", sign=sign) + num_scored,
            num_failed=tallies.total("num_failed", sign=sign) + num_failed,
        )

    async def by_split(self) -> dict[Split, SplitCounts]:
        """Return the counts of every split that has Tasks; runs inside an operation."""
        tallies = await self._read()
        open_ = tallies.ranges_without("ended")
        counted = [
            await self._count_added(tallies.ranges_without("added")),
            await self._count_ended(open_),
        ]
        found: dict[Split, SplitCounts] = {}
        for split in _SPLITS:
            sums = {
                name: tallies.total(name, split=split)
                + sum(counts.get(split, {}).get(name, 0) for counts in counted)
                for name in ("num_groups", "num_records", "num_scored", "num_failed", "score_sum")
            }
            if sums["num_groups"]:
                completed = tallies.total("num_completed", split=split)
                completed += await self._count_completed(split, open_)
                found[split] = SplitCounts(**sums, num_completed=completed)
        return found


def _numbers(orders: Collection[int]) -> list[int]:
    """Return the ids of the tallies that hold these orders."""
    return sorted({order // SPAN for order in orders})


def _within(orders: _Range) -> Document:
    return {"$gte": orders[0], "$lt": orders[1]}


def _ranges(numbers: Iterable[int]) -> list[_Range]:
    """Return the orders of adjacent tallies as ranges; none spans evaluation and training."""
    ranges = []
    for _, run in groupby(enumerate(numbers), lambda pair: (pair[1] - pair[0], pair[1] < 0)):
        spans = [number for _, number in run]
        ranges.append((spans[0] * SPAN, (spans[-1] + 1) * SPAN))
    return ranges


def _by_split(found: Iterable[Document]) -> dict[str, Document]:
    """Return the sums of rows with the same split as their `_id`."""
    sums: dict[str, Document] = {}
    for row in found:
        counts = sums.setdefault(row.pop("_id"), {})
        for name, value in row.items():
            counts[name] = counts.get(name, 0) + value
    return sums

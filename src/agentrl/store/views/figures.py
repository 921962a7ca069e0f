"""Figures of every optimizer step and evaluation, stored for readers that only see the database.

A figure is a number, a text or a mapping of names to them, under the names of `metrics.jsonl`. The
store keeps what it is given, whatever the names mean. Ids end in the step with leading
zeros, so that they are in the order of the steps and no further index is needed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pymongo import ReplaceOne

from agentrl.schema.base import utc_now
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import Document, encode
from agentrl.store.documents.expressions import shown

Figures = Mapping[str, Any]


class FigureRepository(Repository):
    """The figures of a trainer's steps (`step`) and evaluations (`version`), and of policy diffs."""

    @operation("store a step's figures")
    async def put_step(self, consumer: str, figures: Figures) -> None:
        """Store the figures of a step, replacing those of an earlier attempt at the same step."""
        await self._put("steps", consumer, "step", [figures])

    @operation("store an evaluation's figures")
    async def put_evaluation(self, consumer: str, figures: Figures) -> None:
        """Store the figures of a version's evaluation."""
        await self._put("evaluations", consumer, "version", [figures])

    @operation("rewind the figures")
    async def rewind(
        self,
        consumer: str,
        last_step: int,
        steps: Sequence[Figures],
        evaluations: Iterable[Figures],
    ) -> None:
        """Make the figures those of a resumed trainer: forget later ones, add the missing ones."""
        for name in ("steps", "evaluations"):
            await self._db[name].delete_many(_after_step(consumer, last_step))
        newest = await self.last_steps(consumer, 1)
        known = newest[0]["step"] if newest else 0
        await self._put("steps", consumer, "step", [one for one in steps if one["step"] > known])
        await self._put("evaluations", consumer, "version", evaluations)

    @operation("store a policy diff")
    async def put_diff(self, figures: Figures) -> None:
        """Store a comparison; a later one of the same `start`, `end` and `where` replaces it."""
        document = {**encode(dict(figures)), "at": utc_now()}
        key = {name: document[name] for name in ("start", "end", "where")}
        await self._db["diffs"].replace_one({"_id": key}, {"_id": key, **document}, upsert=True)

    @operation("read the policy diffs")
    async def diffs(self) -> list[Document]:
        """Return all comparisons of models, the newest first; `_id` has the models and the condition."""
        return await self._db["diffs"].find({}).sort("at", -1).to_list()

    @operation("look for policy diffs")
    async def has_diffs(self) -> bool:
        """Return whether two models were compared."""
        return await self._db["diffs"].find_one({}, {"_id": 1}) is not None

    async def _put(self, name: str, consumer: str, key: str, figures: Iterable[Figures]) -> None:
        writes = [
            ReplaceOne(
                {"_id": _id(consumer, one[key])},
                encode({**one, "consumer": consumer}),
                upsert=True,
            )
            for one in figures
        ]
        if writes:
            await self._db[name].bulk_write(writes, ordered=False)

    @operation("read the figures of steps")
    async def steps(self, consumer: str, names: Sequence[str], *, after: int = 0) -> list[Document]:
        """Return these figures of the steps after `after`, in order."""
        columns = {"_id": 0, **shown("step", *names)}
        found = self._db["steps"].find(_after_step(consumer, after), columns)
        return await found.sort("_id", 1).to_list()

    @operation("read the figures of the last steps")
    async def last_steps(self, consumer: str, limit: int) -> list[Document]:
        """Return all figures of the last steps, in order."""
        found = self._db["steps"].find(_after_step(consumer, -1), {"_id": 0})
        newest = await found.sort("_id", -1).limit(limit).to_list()
        return newest[::-1]

    @operation("read a step's figures")
    async def step(self, consumer: str, step: int) -> Document | None:
        """Return all figures of one step; None if there are none."""
        found: Document | None = await self._db["steps"].find_one(
            {"_id": _id(consumer, step)}, {"_id": 0}
        )
        return found

    @operation("read the figures of evaluations")
    async def evaluations(self, consumer: str) -> list[Document]:
        """Return the figures of all evaluations by version."""
        found = self._db["evaluations"].find(_after_step(consumer, -1), {"_id": 0})
        return await found.sort("_id", 1).to_list()


def _id(consumer: str, step: int) -> str:
    return f"{consumer}/{step:012d}"


def _after_step(consumer: str, step: int) -> Document:
    """Return the filter of a trainer's figures after a step (-1: all)."""
    # "0" is the character after "/", so this bound follows all ids of the trainer.
    return {"_id": {"$gte": _id(consumer, step + 1), "$lt": f"{consumer}0"}}

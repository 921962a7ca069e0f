"""Finds records by score, outcome, tool, optimizer step, column or text.

Input: a `RecordFilter`. Output: Records. With a score condition, the index `by_score` returns them
in order of score; otherwise the index `claimable` returns the latest questions first. Tools, columns
and texts are searched record by record until enough are found, because an index over all turns would be
too large.
"""

import json
import re
from contextlib import suppress
from typing import Any, Self

from agentrl.errors import ConfigError
from agentrl.schema import Outcome, Record
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document, encode, from_document
from agentrl.store.documents.expressions import lookup

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_COMPARISON = re.compile(rf"(>=|<=|==?|>|<|)\s*({_NUMBER})", re.IGNORECASE)
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})", re.IGNORECASE)
_COLUMN = re.compile(r"\s*([^\s$=\0][^=\0]*?)\s*=\s*(.*?)\s*", re.DOTALL)
_OPERATORS = {">=": "$gte", "<=": "$lte", ">": "$gt", "<": "$lt"}


class ScoreFilter(Value):
    """A condition on the score."""

    condition: dict[str, float]
    """MongoDB's operators and their numbers; empty for records without a score."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the condition written as `>=0.5`, `<0.2`, `1`, `0.2..0.8` or `none`."""
        stripped = text.strip()
        if stripped.lower() == "none":
            return cls(condition={})
        if found := _COMPARISON.fullmatch(stripped):
            return cls(condition={_OPERATORS.get(found[1], "$eq"): float(found[2])})
        if found := _RANGE.fullmatch(stripped):
            return cls(condition={"$gte": float(found[1]), "$lte": float(found[2])})
        raise ConfigError(
            f"{text!r} is not a condition on a score; give '>=0.5', '<0.2', 1, 0.2..0.8, or none"
        )

    @property
    def is_upper_bound(self) -> bool:
        """Whether the condition asks for low scores, which are then sorted first."""
        return self.condition.keys() <= {"$lt", "$lte"}


def of_column(text: str) -> Document:
    """Return the filter of questions with a value in a column of their own.

    Args:
        text: `NAME=VALUE`, or `NAME.KEY=VALUE` of an object. VALUE is a text, number, true or false;
            one item of a list is enough.
    """
    found = _COLUMN.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a condition on a column; give NAME=VALUE")
    values: list[Any] = [encode(found[2])]
    if not found[2].startswith(("[", "{")):
        with suppress(ValueError):
            values.append(encode(json.loads(found[2])))
    return {f"columns.{encode(found[1])}": {"$in": values}}


class RecordFilter(Value):
    """Conditions on the records to find; None means any."""

    score: ScoreFilter | None = None
    outcome: Outcome | None = None
    tool: str | None = None
    """Name of a tool that the model called."""
    step: int | None = None
    """Optimizer step that trained or dropped them."""
    column: str | None = None
    """A value in a column of the question; see `of_column`."""
    search: str | None = None
    """Case-insensitive text in the question, the answer, the error, a reply, a tool result or a
    message. Very long texts are stored separately and not searched."""


async def find_records(
    database: RunDatabase, wanted: RecordFilter, *, consumer: str, limit: int
) -> list[Record]:
    """Return at most `limit` matching records."""
    match, sort = _match(wanted)
    if wanted.step is not None:
        match["_id"] = {"$in": await _ids_of_step(database, wanted.step, consumer)}
    pipeline: list[Document] = [
        {"$match": match},
        {"$sort": dict.fromkeys([*sort, "order", "traj_id"], 1 if _is_ascending(wanted) else -1)},
        *_turn_stages(wanted),
        {"$limit": limit},
        {"$project": {"found": 0, "task": 0}},
    ]
    found = await database.aggregate(database.records, pipeline)
    return [from_document(Record, document) for document in found]


def _match(wanted: RecordFilter) -> tuple[Document, list[str]]:
    """Return the filter on the record itself, and the primary sort keys."""
    match: Document = {} if wanted.outcome is None else {"outcome": wanted.outcome}
    if wanted.tool is not None:
        match["num_tool_calls"] = {"$gt": 0}
    if wanted.score is not None and wanted.score.condition:
        return {**match, "score.value": wanted.score.condition}, ["score.value"]
    statuses = ["running", "finished", "failed"] + ["scored"] * (wanted.score is None)
    return {**match, "status": {"$in": statuses}}, []


def _is_ascending(wanted: RecordFilter) -> bool:
    return wanted.score is not None and bool(wanted.score.condition) and wanted.score.is_upper_bound


def _turn_stages(wanted: RecordFilter) -> list[Document]:
    """Return the stages that search the turns and the question of each record in sequence."""
    stages: list[Document] = []
    if wanted.tool is not None:
        stages += [
            _turn_lookup({"tool_calls.name": wanted.tool}),
            {"$match": {"found": {"$ne": []}}},
        ]
    if wanted.column is not None:
        asked: Document = {"$match": of_column(wanted.column)}
        stages += [
            lookup("tasks", "task_id", "_id", "task", asked, {"$project": {"_id": 1}}),
            {"$match": {"task": {"$ne": []}}},
        ]
    if wanted.search is not None:
        text: dict[str, Any] = {"$regex": re.escape(wanted.search), "$options": "i"}
        fields = ("output_text", "tool_results.content", "added_messages.content")
        stages += [
            _turn_lookup({"$or": [{field: text} for field in fields]}),
            lookup("tasks", "task_id", "_id", "task", {"$project": {"query": 1}}),
            {
                "$match": {
                    "$or": [
                        *({field: text} for field in ("final_answer", "error", "task.query")),
                        {"found": {"$ne": []}},
                    ]
                }
            },
        ]
    return stages


def _turn_lookup(match: Document) -> Document:
    return lookup(
        *("turns", "_id", "record_id", "found"),
        *({"$match": match}, {"$limit": 1}, {"$project": {"_id": 1}}),
    )


async def _ids_of_step(database: RunDatabase, step: int, consumer: str) -> list[str]:
    entry = f"ledger.{consumer}"
    consumed: Document = {
        "$or": [
            {f"{entry}.trained_at": step},
            {f"{entry}.status": {"$in": ["reserved", "dropped"]}, f"{entry}.step": step},
        ]
    }
    return [one["_id"] async for one in database.record_data.find(consumed, {"_id": 1})]

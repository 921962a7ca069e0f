"""Pages of a run for readers: groups by what their rollouts did, and words in texts.

Every result is bounded and continues at a cursor; every query uses an index, so a page costs the
same in a run of a million turns as in a small one. Nothing here writes except `index_turns`, which
is explicit.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field
from pymongo.errors import OperationFailure

from agentrl.schema import LedgerEntry, Outcome, RecordStatus, Split
from agentrl.schema.base import Value
from agentrl.schema.task import TaskStatus
from agentrl.store.collections.indexes import BROWSED, TURN_WORDS
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import Document, encode, without_none
from agentrl.store.documents.expressions import shown
from agentrl.store.views.record_search import of_column

MAX_MILLISECONDS = 2000
"""The server aborts a query that takes longer."""
_SEARCH_SECONDS = 0.25
"""Time after which a page is returned incomplete, with the place to continue from."""
_WINDOW_ORDERS = 2000
_CANDIDATES = 400
_NO_TEXT_INDEX = 27
_LAST_ID = chr(0x10FFFF)
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class Place(NamedTuple):
    """A cursor in a run's stream of groups; the next page starts after it."""

    order: int
    task_id: str


class GroupFilter(Value):
    """Filter of groups. The fields from `outcome` to `min_tokens` must all match one rollout."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    split: Split = "train"
    tag: str | None = None
    """A label of the question, or the name of an evaluation."""
    tool: str | None = None
    column: str | None = None
    """A value in a column of the question; see `of_column`."""
    text: str | None = None
    """Words of the question, of an answer, of a judge, or of turns where they are indexed."""
    min_spread: float | None = None
    """Least difference between the highest and the lowest score."""
    outcome: Outcome | None = None
    min_score: float | None = None
    max_score: float | None = None
    version: _Count | None = None
    """A policy version that sampled a token of the rollout."""
    min_attempts: _Count | None = None
    min_tokens: _Count | None = None

    @property
    def depends_on_rollouts(self) -> bool:
        """Whether the filter depends on the rollouts of a group."""
        return bool(self.rollout_expressions()) or self.min_spread is not None

    @property
    def depends_only_on_rollouts(self) -> bool:
        """Whether the filter depends on rollouts, but not on text, tool, tag or column."""
        others = (self.text, self.tool, self.tag, self.column)
        return self.depends_on_rollouts and others == (None,) * len(others)

    def rollout_expressions(self) -> list[Document]:
        """Return the expressions that one rollout of the group must all match."""
        conditions = [
            ("$eq", "$outcome", self.outcome),
            ("$gte", "$score.value", self.min_score),
            ("$lte", "$score.value", self.max_score),
            ("$gte", "$attempt", self.min_attempts),
            ("$gte", "$num_tokens", self.min_tokens),
            ("$lte", "$min_version", self.version),
            ("$gte", "$max_version", self.version),
        ]
        expressions: list[Document] = [
            {op: [name, value]} for op, name, value in conditions if value is not None
        ]
        if self.max_score is not None:  # in BSON's order, a missing score is less than any number
            expressions.append({"$isNumber": "$score.value"})
        if self.version is not None:
            expressions.append({"$isNumber": "$min_version"})
        return expressions


class Try(Value):
    """One record of a group at a glance."""

    record_id: str
    traj_id: int
    status: RecordStatus
    score: float | None = None
    outcome: Outcome | None = None
    attempt: int = 0
    num_turns: int = 0
    num_output_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    ledger: dict[str, LedgerEntry] = Field(default_factory=dict)


class GroupRow(Value):
    """One question with its rollouts."""

    task_id: str
    order: int
    split: Split
    status: TaskStatus
    tag: str = ""
    tags: tuple[str, ...] = ()
    query: str = ""
    completed_at: datetime | None = None
    tries: tuple[Try, ...] = ()


class GroupPage(Value):
    """A page of groups, and the cursor of the next one."""

    groups: tuple[GroupRow, ...]
    next: Place | None
    """None after the last page."""


class Passage(Value):
    """A text in which words were found."""

    kind: str
    """`question`, `answer`, `judge`, `output` or `tool`."""
    task_id: str
    record_id: str | None = None
    turn: int | None = None
    text: str


class Passages(Value):
    """What a search found."""

    found: tuple[Passage, ...]
    is_cut: bool
    """There are more."""
    has_words: bool
    """Questions and answers are indexed; runs of earlier releases are not."""
    has_turn_words: bool
    """Turns are indexed."""


class BrowseRepository(Repository):
    """Reads pages of groups, and searches texts."""

    @operation("read groups")
    async def groups(
        self, wanted: GroupFilter, *, limit: int, newest: bool = False, after: Place | None = None
    ) -> GroupPage:
        """Return the next matching groups, in the order of the run or from the newest back.

        A page may hold fewer than `limit` groups, or none, although more follow: a slow search
        returns what it has found. Only completed groups match a filter on rollouts.
        """
        started = time.monotonic()
        found: list[str] = []
        place = after or await self._first_place(wanted.split, newest=newest)
        while place is not None and len(found) < limit:
            if time.monotonic() - started > _SEARCH_SECONDS:
                break
            if wanted.depends_only_on_rollouts:
                page, next_place = await self._window(wanted, place, newest=newest)
            else:
                candidates, next_place = await self._candidates(wanted, place, newest=newest)
                matching = await self._matching_ids(wanted, [one.task_id for one in candidates])
                page = [one for one in candidates if one.task_id in matching]
            if len(found) + len(page) > limit:
                page = page[: limit - len(found)]
                next_place = page[-1]
            found += [one.task_id for one in page]
            place = next_place
        return GroupPage(groups=tuple(await self.rows(found)), next=place)

    async def _first_place(self, split: Split, *, newest: bool) -> Place | None:
        """Return the place before all groups; with `newest`, the one after the last that was begun."""
        if not newest:
            return Place(-(2**31), "")
        orders: Document = {"$gte": 0} if split == "train" else {"$lt": 0}
        begun = await asyncio.gather(
            *(
                self._db.records.find_one(
                    {"status": status, "order": orders},
                    {"_id": 0, "order": 1},
                    sort=[("order", -1)],
                )
                for status in ("running", "finished", "scored", "failed")
            )
        )
        last = [one["order"] for one in begun if one is not None]
        return Place(max(last) + 1, "") if last else None

    async def _candidates(
        self, wanted: GroupFilter, place: Place, *, newest: bool
    ) -> tuple[list[Place], Place | None]:
        """Return groups after a cursor, from the most selective index, and the cursor after them."""
        if wanted.text is not None:
            ids = {one.task_id for one in (await self.search(wanted.text, limit=_CANDIDATES)).found}
            named = {"_id": {"$in": sorted(ids)}, "split": wanted.split}
            tasks = self._db.tasks.find(named, {"order": 1}).max_time_ms(MAX_MILLISECONDS)
            matching = [Place(one["order"], one["_id"]) async for one in tasks]
            remaining = [one for one in matching if _is_after(one, place, newest)]
            return sorted(remaining, reverse=newest), None
        source, key, fields = self._db.tasks, "_id", without_none(split=wanted.split)
        if wanted.tool is not None:
            source, key, fields = self._db.records, "task_id", {"tool_names": wanted.tool}
        elif wanted.tag is not None and wanted.split != "train":
            fields["tag"] = wanted.tag
        elif wanted.tag is not None:
            fields = {"tags": wanted.tag}
        sign = -1 if newest else 1
        orders = {"$lte" if newest else "$gte": place.order}
        cursor = source.find({**fields, "order": orders}, {"_id": 0, "order": 1, key: 1})
        keys = cursor.sort([("order", sign), (key, sign)]).limit(_CANDIDATES)
        read = [Place(one["order"], one[key]) async for one in keys.max_time_ms(MAX_MILLISECONDS)]
        remaining = [one for one in dict.fromkeys(read) if _is_after(one, place, newest)]
        return remaining, read[-1] if len(read) == _CANDIDATES else None

    async def _window(
        self, wanted: GroupFilter, place: Place, *, newest: bool
    ) -> tuple[list[Place], Place | None]:
        """Return the groups in a part of the run that have a completed rollout."""
        sign = -1 if newest else 1
        orders: Document = {"$lte" if newest else "$gte": place.order}
        first = await self._db.record_data.find_one(
            {"split": wanted.split, "order": orders},
            {"_id": 0, "order": 1},
            sort=[("split", sign), ("order", sign)],
        )
        if first is None:
            return [], None
        end = first["order"] + sign * _WINDOW_ORDERS
        orders = (
            {"$lte": first["order"], "$gt": end} if newest else {"$gte": first["order"], "$lt": end}
        )
        matching = await self._matching_groups(wanted, {"split": wanted.split, "order": orders})
        found = sorted(matching, reverse=newest)
        # Every group of the last order has been seen.
        last = Place(end - sign, "" if newest else _LAST_ID)
        return [one for one in found if _is_after(one, place, newest)], last

    async def _matching_ids(self, wanted: GroupFilter, task_ids: Sequence[str]) -> set[str]:
        """Return those of the groups that match the whole filter."""
        if not task_ids:
            return set()
        matching = set(task_ids)
        if wanted.depends_on_rollouts:
            groups = await self._matching_groups(wanted, {"task_id": {"$in": list(task_ids)}})
            matching &= {one.task_id for one in groups}
        by_tool: Document = {"task_id": {"$in": list(matching)}, "tool_names": wanted.tool}
        if wanted.tool is not None:
            found = self._db.records.find({**by_tool, "split": wanted.split}, {"task_id": 1})
            matching &= {one["task_id"] async for one in found.max_time_ms(MAX_MILLISECONDS)}
        asked: list[Document] = []
        if wanted.tag is not None:
            asked.append({"$or": [{"tags": wanted.tag}, {"tag": wanted.tag}]})
        if wanted.column is not None:
            asked.append(of_column(wanted.column))
        if asked:
            found = self._db.tasks.find({"_id": {"$in": list(matching)}, "$and": asked}, {"_id": 1})
            matching &= {one["_id"] async for one in found.max_time_ms(MAX_MILLISECONDS)}
        return matching

    async def _matching_groups(self, wanted: GroupFilter, match: Document) -> list[Place]:
        """Return the matching groups whose rollouts match; reads index keys only."""
        keys = {"_id": 0, **shown("order", "task_id", *BROWSED)}
        spread = {"$subtract": ["$high", "$low"]}
        pipeline: list[Document] = [
            {"$match": match},
            {"$project": keys},
            {
                "$group": {
                    "_id": {"order": "$order", "task_id": "$task_id"},
                    "fits": {"$max": {"$and": wanted.rollout_expressions() or [True]}},
                    "high": {"$max": "$score.value"},
                    "low": {"$min": "$score.value"},
                }
            },
            {"$match": {"fits": True}},
        ]
        if wanted.min_spread is not None:
            pipeline.append({"$match": {"$expr": {"$gte": [spread, wanted.min_spread]}}})
        cursor = await self._db.record_data.aggregate(pipeline, maxTimeMS=MAX_MILLISECONDS)
        return [Place(one["_id"]["order"], one["_id"]["task_id"]) async for one in cursor]

    @operation("read the rows of groups")
    async def rows(self, task_ids: Sequence[str]) -> list[GroupRow]:
        """Return these groups with their rollouts, in the order of the ids."""
        ids = {"$in": list(task_ids)}
        names = ("order", "split", "status", "tag", "tags", "query", "description", "completed_at")
        tasks = {one["_id"]: one async for one in self._db.tasks.find({"_id": ids}, shown(*names))}
        ledgers = {
            one["_id"]: one["ledger"]
            async for one in self._db.record_data.find({"task_id": ids}, {"ledger": 1})
        }
        tries: dict[str, list[Try]] = {task_id: [] for task_id in task_ids}
        columns = {
            **shown("task_id", "traj_id", "status", "outcome", "attempt", "num_output_tokens"),
            **shown("min_version", "max_version"),
            "score": "$score.value",
            "num_turns": {"$size": "$turns"},
        }
        async for one in self._db.records.find({"task_id": ids}, columns):
            record_id = one.pop("_id")
            ledger = ledgers.get(record_id, {})
            tries[one["task_id"]].append(Try(record_id=record_id, ledger=ledger, **one))
        return [
            GroupRow(
                task_id=task_id,
                **{name: tasks[task_id][name] for name in names[:-3] if name in tasks[task_id]},
                query=tasks[task_id].get("query") or tasks[task_id].get("description", ""),
                completed_at=tasks[task_id].get("completed_at"),
                tries=tuple(sorted(tries[task_id], key=lambda one: one.traj_id)),
            )
            for task_id in task_ids
            if task_id in tasks
        ]

    @operation("read answers")
    async def answers(self, task_ids: Sequence[str]) -> dict[str, list[str | None]]:
        """Return the final answers of the scored rollouts of each group."""
        wanted = {"task_id": {"$in": list(task_ids)}, "status": "scored"}
        found: dict[str, list[str | None]] = {}
        async for one in self._db.records.find(wanted, shown("task_id", "final_answer")):
            found.setdefault(one["task_id"], []).append(one.get("final_answer"))
        return found

    @operation("search texts")
    async def search(self, text: str, *, limit: int) -> Passages:
        """Return texts that hold all words, or the phrases in quotation marks; any case."""
        phrases = [
            quoted or word for quoted, word in re.findall(r'"([^"]+)"|([^\s"]+)', encode(text))
        ]
        if not phrases:
            return Passages(found=(), is_cut=False, has_words=True, has_turn_words=True)
        wanted = {"$text": {"$search": " ".join(f'"{phrase}"' for phrase in phrases)}}
        tasks, records, turns = await asyncio.gather(
            self._texts("tasks", wanted, ("query",), limit),
            self._texts("records", wanted, ("final_answer", "score.detail"), limit),
            self._texts("turns", wanted, ("index", "output_text", "tool_results.content"), limit),
        )
        found = [
            Passage(kind="question", task_id=one["_id"], text=one["query"]) for one in tasks or ()
        ]
        found += [passage for one in records or () for passage in _record_passages(one, phrases)]
        found += [passage for one in turns or () for passage in _turn_passages(one, phrases)]
        return Passages(
            found=tuple(found[:limit]),
            is_cut=len(found) >= limit,
            has_words=tasks is not None,
            has_turn_words=turns is not None,
        )

    async def _texts(
        self, collection: str, wanted: Document, names: Sequence[str], limit: int
    ) -> list[Document] | None:
        """Return the matching texts; None if the collection has no text index."""
        columns = shown("task_id", "record_id", *names)
        found = self._db[collection].find(wanted, columns)
        try:
            return await found.limit(limit).max_time_ms(MAX_MILLISECONDS).to_list()
        except OperationFailure as error:
            if error.code != _NO_TEXT_INDEX:
                raise
            return None

    @operation("index the texts of turns")
    async def index_turns(self) -> None:
        """Create the text index of turns, present and future."""
        await self._db.turns.create_indexes([TURN_WORDS])


def _is_after(one: Place, place: Place, newest: bool) -> bool:
    return one < place if newest else one > place


def _record_passages(one: Document, phrases: Sequence[str]) -> list[Passage]:
    task_id = one["_id"].rpartition("/")[0]
    texts = {"answer": one.get("final_answer"), "judge": (one.get("score") or {}).get("detail")}
    return [
        Passage(kind=kind, task_id=task_id, record_id=one["_id"], text=text)
        for kind, text in texts.items()
        if text and _contains_any(text, phrases)
    ]


def _turn_passages(one: Document, phrases: Sequence[str]) -> list[Passage]:
    ids: dict[str, Any] = {
        "task_id": one["task_id"],
        "record_id": one["record_id"],
        "turn": one["index"],
    }
    texts = [("output", one["output_text"])]
    texts += [("tool", result.get("content")) for result in one["tool_results"]]
    return [
        Passage(kind=kind, text=text, **ids)
        for kind, text in texts
        if isinstance(text, str) and _contains_any(text, phrases)
    ]


def _contains_any(text: str, phrases: Sequence[str]) -> bool:
    folded = text.casefold()
    return any(phrase.casefold() in folded for phrase in phrases)

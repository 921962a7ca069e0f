"""What rollouts did, for readers: by step, by question, by kind of failure, and at this moment.

Every result is bounded, whatever the run's size: lengths come from some steps and some of their
rollouts, questions and failures from the newest part of the stream.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import Field

from agentrl.schema import Outcome, RecordStatus, Split
from agentrl.schema.base import Value
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.views.browsing import MAX_MILLISECONDS

ROLLOUTS_A_STEP = 48
"""Rollouts of a step whose lengths are shown."""
TOOL_ROLLOUTS_A_STEP = 12
"""Those of them whose tool results are read."""
FAILURE_GROUPS = 2000
"""Newest groups whose outcomes are counted."""
TOOL_ROLLOUTS = 400
"""Newest rollouts whose tool results are read."""
TIMED_TURNS = 4000
"""Turns of them whose tools are timed."""
QUESTION_KEYS = 60_000
"""Rollouts that the means of questions are computed from."""
RUNNING_SHOWN = 100
EXCERPT_CHARS = 400


class RolloutFacts(Value):
    """The size of one rollout, and how it ended."""

    record_id: str
    step: int
    """Optimizer step that consumed it."""
    score: float | None = None
    outcome: Outcome | None = None
    num_turns: int = 0
    num_output_tokens: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int | None = None
    """None where tool results were not read."""


class OutcomeCount(Value):
    """A kind of failure: how a rollout ended without being right."""

    kind: str
    """An outcome, `wrong answer`, or `failed` without an outcome."""
    num: int
    task_id: str
    """A group with such a rollout."""
    record_id: str | None = None
    reply: str = ""
    """The end of what its model said last."""


class ToolFailure(Value):
    """A result that a tool reported as an error."""

    record_id: str
    turn: int
    tool: str
    text: str


class ToolCallTime(Value):
    """How long a tool took to answer a call."""

    record_id: str
    turn: int
    tool: str
    seconds: float
    is_error: bool


class QuestionTime(Value):
    """A question at one time: an epoch, or the version that an evaluation asked."""

    task_id: str
    mean: float
    low: float
    high: float
    num: int


class LatestReply(Value):
    """What a rollout in progress said last."""

    record_id: str
    attempt: int
    status: RecordStatus
    num_turns: int
    started_at: datetime | None = None
    last_turn_at: datetime | None = None
    said: str = ""
    """The start of its model's last reply."""
    calls: tuple[str, ...] = Field(default=())
    """Tools that this reply called."""


class BehaviorRepository(Repository):
    """Reads bounded samples of what rollouts did."""

    @operation("read the rollouts of steps")
    async def of_steps(self, consumer: str, steps: Sequence[int]) -> list[RolloutFacts]:
        """Return the sizes of some rollouts of each step, chosen without regard to their length."""
        entry = f"ledger.{consumer}"
        wanted = {
            f"{entry}.status": {"$in": ["trained", "dropped"]},
            f"{entry}.step": {"$in": [*steps]},
        }
        by_step: defaultdict[int, list[str]] = defaultdict(list)
        found = self._db.record_data.find(wanted, {f"{entry}.step": 1})
        async for one in found.max_time_ms(MAX_MILLISECONDS):
            by_step[one["ledger"][consumer]["step"]].append(one["_id"])
        # In the order in which they ended, the short ones would come first.
        drawn = {step: sorted(ids, key=_shuffled) for step, ids in by_step.items()}
        step_of = {own: step for step, ids in drawn.items() for own in ids[:ROLLOUTS_A_STEP]}
        read = [own for ids in drawn.values() for own in ids[:TOOL_ROLLOUTS_A_STEP]]
        tool_errors = dict.fromkeys(read, 0)
        for failure in await self._tool_failures(read, len(read) * 100):
            tool_errors[failure.record_id] += 1
        facts = [
            RolloutFacts(
                record_id=one["_id"],
                step=step_of[one["_id"]],
                score=one.get("score"),
                outcome=one.get("outcome"),
                num_turns=one["num_turns"],
                num_output_tokens=one["num_output_tokens"],
                num_tool_calls=one["num_tool_calls"],
                num_tool_errors=tool_errors.get(one["_id"]),
            )
            async for one in self._db.records.find(
                {"_id": {"$in": [*step_of]}},
                {
                    **shown("outcome", "num_output_tokens", "num_tool_calls"),
                    "score": "$score.value",
                    "num_turns": {"$size": "$turns"},
                },
            )
        ]
        return sorted(facts, key=lambda one: (one.step, one.record_id))

    @operation("count the kinds of failures")
    async def outcomes(self) -> tuple[int, list[OutcomeCount]]:
        """Return the number of rollouts of the newest groups, and their failures by kind."""
        run = await self._db.runs.find_one({}, {"admitted_groups": 1})
        newest = run["admitted_groups"] if run else 0
        is_wrong = {
            "$and": [{"$isNumber": "$score.value"}, {"$lte": ["$score.value", 0]}],
        }
        answered = {"$cond": [is_wrong, "wrong answer", "right"]}
        ended = {"$ifNull": ["$outcome", "failed"]}
        kind = {"$cond": [{"$eq": ["$outcome", "answered"]}, answered, ended]}
        found = await self._db.aggregate(
            self._db.record_data,
            [
                {"$match": {"split": "train", "order": {"$gte": newest - FAILURE_GROUPS}}},
                {"$project": {"_id": 0, **shown("task_id", "outcome", "score.value")}},
                {"$group": {"_id": kind, "num": {"$sum": 1}, "task_id": {"$last": "$task_id"}}},
                {"$sort": {"num": -1}},
            ],
        )
        counts = [
            await self._with_example(OutcomeCount(kind=one.pop("_id"), **one))
            for one in found
            if one["_id"] != "right"
        ]
        return sum(one["num"] for one in found), counts

    async def _with_example(self, count: OutcomeCount) -> OutcomeCount:
        """Return a kind with one of its rollouts, and what its model said last."""
        wanted: Document = {"task_id": count.task_id}
        if count.kind == "wrong answer":
            wanted |= {"outcome": "answered", "score.value": {"$lte": 0}}
        else:
            wanted |= {"outcome": None if count.kind == "failed" else count.kind}
        record = await self._db.records.find_one(wanted, {"turns": {"$slice": -1}})
        if record is None:
            return count
        last = await self._db.turns.find_one(
            {"_id": {"$in": record.get("turns", [])}}, {"output_text": 1}
        )
        reply = "" if last is None else str(last["output_text"])[-EXCERPT_CHARS:]
        return count.model_copy(update={"record_id": record["_id"], "reply": reply})

    @operation("read tool errors")
    async def tool_failures(self) -> list[ToolFailure]:
        """Return what tools reported as errors in the newest rollouts; not the copies in branches."""
        num_copied = await self._newest_rollouts()
        found = await self._tool_failures([*num_copied], TOOL_ROLLOUTS)
        return [failure for failure in found if failure.turn >= num_copied[failure.record_id]]

    @operation("read how long tools took")
    async def tool_call_times(self) -> list[ToolCallTime]:
        """Return the calls of the newest rollouts that a tool answered; not the copies in branches."""
        num_copied = await self._newest_rollouts()
        of_tools = ("tool_results.name", "tool_results.seconds", "tool_results.is_error")
        found = self._db.turns.find(
            {"record_id": {"$in": [*num_copied]}}, shown("record_id", "index", *of_tools)
        )
        return [
            ToolCallTime(
                record_id=turn["record_id"],
                turn=turn["index"],
                tool=result["name"],
                seconds=result.get("seconds", 0.0),
                is_error=result.get("is_error", False),
            )
            async for turn in found.limit(TIMED_TURNS)
            if turn["index"] >= num_copied[turn["record_id"]]
            for result in turn["tool_results"]
        ]

    async def _newest_rollouts(self) -> dict[str, int]:
        """Return the ids of the newest rollouts, and how many turns each copied from another."""
        newest = self._db.record_data.find({"split": "train"}, shown("branch.turn"))
        return {
            one["_id"]: (one.get("branch") or {}).get("turn", 0)
            async for one in newest.sort([("split", -1), ("order", -1)]).limit(TOOL_ROLLOUTS)
        }

    async def _tool_failures(self, record_ids: Sequence[str], limit: int) -> list[ToolFailure]:
        """Return what tools reported as errors; a call that could not be read is among them."""
        wrong: Document = {"$filter": {"input": "$tool_results", "cond": "$$this.is_error"}}
        text = {"$substrCP": ["$$this.content", 0, EXCERPT_CHARS]}
        results = {"$map": {"input": wrong, "in": {"name": "$$this.name", "text": text}}}
        match = {"record_id": {"$in": [*record_ids]}, "tool_results.is_error": True}
        found = await self._db.aggregate(
            self._db.turns,
            [
                {"$match": match},
                {"$limit": limit},
                {"$project": {**shown("record_id", "index"), "results": results}},
            ],
        )
        return [
            ToolFailure(
                record_id=one["record_id"], turn=one["index"], tool=each["name"], text=each["text"]
            )
            for one in found
            for each in one["results"]
        ]

    @operation("read the means of questions")
    async def question_times(self, split: Split) -> tuple[list[QuestionTime], bool]:
        """Return the mean score of each question at each time, and whether older ones are left out.

        Training shows the newest groups; of evaluations, the first questions are shown completely.
        """
        sign = -1 if split == "train" else 1
        keys = {"_id": 0, **shown("task_id", "score.value")}
        means = {"mean": {"$avg": "$score.value"}, "num": {"$sum": 1}}
        ends = {"low": {"$min": "$score.value"}, "high": {"$max": "$score.value"}}
        order = {"split": sign, "order": sign, "task_id": sign}
        found = await self._db.aggregate(
            self._db.record_data,
            [
                {"$match": {"split": split}},
                {"$sort": order},
                {"$limit": QUESTION_KEYS},
                {"$project": keys},
                {"$match": {"score.value": {"$gt": float("-inf")}}},
                {"$group": {"_id": "$task_id", **means, **ends}},
            ],
        )
        times = [QuestionTime(task_id=one.pop("_id"), **one) for one in found]
        return times, sum(one.num for one in times) >= QUESTION_KEYS

    @operation("read the texts of questions")
    async def question_texts(self, task_ids: Sequence[str]) -> dict[str, str]:
        """Return the texts of questions by their ids."""
        found = self._db.tasks.find({"_id": {"$in": [*task_ids]}}, shown("query", "description"))
        return {one["_id"]: one.get("query") or one.get("description", "") async for one in found}

    @operation("read running rollouts")
    async def running(self, limit: int = RUNNING_SHOWN) -> list[LatestReply]:
        """Return rollouts in progress, those with the latest start first."""
        columns = {
            **shown("attempt", "status", "started_at"),
            "num_turns": {"$size": "$turns"},
            "last": {"$arrayElemAt": ["$turns", -1]},
        }
        found = await self._db.records.find({"status": "running"}, columns).limit(limit).to_list()
        last_ids = [one["last"] for one in found if "last" in one]
        said = {"$substrCP": ["$output_text", 0, EXCERPT_CHARS]}
        turns: dict[str, Any] = {
            one["_id"]: one
            async for one in self._db.turns.find(
                {"_id": {"$in": last_ids}},
                {"finished_at": 1, "said": said, "calls": "$tool_calls.name"},
            )
        }
        rollouts = []
        for one in found:
            turn = turns.get(one.pop("last", ""), {})
            rollouts.append(
                LatestReply(
                    record_id=one.pop("_id"),
                    last_turn_at=turn.get("finished_at"),
                    said=turn.get("said", ""),
                    calls=turn.get("calls", ()),
                    **one,
                )
            )
        rollouts.sort(key=lambda one: str(one.started_at), reverse=True)
        return rollouts

    @operation("look for evaluations")
    async def has_evaluations(self) -> bool:
        """Return whether a question was asked outside training."""
        return await self._db.tasks.find_one({"split": {"$ne": "train"}}, {"_id": 1}) is not None

    @operation("read a rollout's standing")
    async def standing(self, record_id: str) -> Document | None:
        """Return how far a rollout is, which changes with each of its turns."""
        columns = {"_id": 0, **shown("status", "attempt"), "num_turns": {"$size": "$turns"}}
        found: Document | None = await self._db.records.find_one({"_id": record_id}, columns)
        return found


def _shuffled(record_id: str) -> int:
    return zlib.crc32(record_id.encode())

"""What rollouts did, as pages show it: by step, by question, by kind of failure, and at this moment.

Every answer is bounded, whatever the run's size, and says what it was computed from: lengths come
from some steps and some of their rollouts, questions and failures from the newest part of the stream.
"""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from statistics import median
from typing import Any, Literal

from agentrl.schema import Split
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.views.browsing import MAX_MILLISECONDS

STEPS_SHOWN = 40
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
QUESTIONS_SHOWN = 200
RUNNING_SHOWN = 100
EXCERPT_CHARS = 400
_QUESTION_CHARS = 300
_MAX_TIMES = 40
_IDS_SHOWN = 2000
_SIZES = ("score", "outcome", "num_turns", "num_output_tokens", "num_tool_calls")
_TASK_ID = re.compile(r"[^/]+/(?P<time>\d{1,9})/(?P<question>.+?)(~\d+)?", re.DOTALL)

QuestionKind = Literal["all", "nobody", "everybody", "some"]


class BehaviorRepository(Repository):
    """Reads bounded samples of what rollouts did."""

    @operation("read the rollouts of steps")
    async def distributions(self, consumer: str, last_step: int) -> Document:
        """Return sizes and outcomes of rollouts at some steps of the run, as columns.

        The rollouts of a step are chosen without regard to their length.
        """
        steps = _spaced(last_step)
        entry = f"ledger.{consumer}"
        wanted = {
            f"{entry}.status": {"$in": ["trained", "dropped"]},
            f"{entry}.step": {"$in": steps},
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
            tool_errors[failure["record_id"]] += 1
        columns = {
            **shown("outcome", "num_output_tokens", "num_tool_calls"),
            "score": "$score.value",
            "num_turns": {"$size": "$turns"},
        }
        records = await self._db.records.find({"_id": {"$in": [*step_of]}}, columns).to_list()
        records.sort(key=lambda one: (step_of[one["_id"]], one["_id"]))
        return {
            "steps": steps,
            "rollouts_a_step": ROLLOUTS_A_STEP,
            "tool_rollouts_a_step": TOOL_ROLLOUTS_A_STEP,
            "columns": {
                "record_id": [one["_id"] for one in records],
                "step": [step_of[one["_id"]] for one in records],
                **{name: [one.get(name) for one in records] for name in _SIZES},
                # None where tool results were not read.
                "num_tool_errors": [tool_errors.get(one["_id"]) for one in records],
            },
        }

    @operation("count the kinds of failures")
    async def failure_kinds(self) -> Document:
        """Return the failures of the newest rollouts by kind, each with an example."""
        num_rollouts, kinds = await self._outcomes()
        num_copied = await self._newest_rollouts()
        by_text: defaultdict[tuple[str, str], list[Document]] = defaultdict(list)
        for failure in await self._tool_failures([*num_copied], TOOL_ROLLOUTS):
            # Branches have copies of turns.
            if failure["turn"] >= num_copied[failure["record_id"]]:
                by_text[failure["tool"], common_text(failure["text"])].append(failure)
        ordered = sorted(by_text.values(), key=len, reverse=True)
        return {
            "num_groups": FAILURE_GROUPS,
            "num_rollouts": num_rollouts,
            "kinds": kinds,
            "num_tool_rollouts": TOOL_ROLLOUTS,
            "times": _tool_times(await self._tool_calls(num_copied)),
            "tools": [{"num": len(found), **found[-1]} for found in ordered],
        }

    async def _outcomes(self) -> tuple[int, list[Document]]:
        """Return the number of rollouts of the newest groups, and their failures by kind.

        A kind is an outcome, `wrong answer`, or `failed` without an outcome.
        """
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
        kinds = [
            {
                "kind": one["_id"],
                "num": one["num"],
                "task_id": one["task_id"],
                **await self._example(one["_id"], one["task_id"]),
            }
            for one in found
            if one["_id"] != "right"
        ]
        return sum(one["num"] for one in found), kinds

    async def _example(self, kind: str, task_id: str) -> Document:
        """Return a rollout of a kind, and the end of what its model said last."""
        wanted: Document = {"task_id": task_id}
        if kind == "wrong answer":
            wanted |= {"outcome": "answered", "score.value": {"$lte": 0}}
        else:
            wanted |= {"outcome": None if kind == "failed" else kind}
        record = await self._db.records.find_one(wanted, {"turns": {"$slice": -1}})
        if record is None:
            return {"record_id": None, "reply": ""}
        last = await self._db.turns.find_one(
            {"_id": {"$in": record.get("turns", [])}}, {"output_text": 1}
        )
        reply = "" if last is None else str(last["output_text"])[-EXCERPT_CHARS:]
        return {"record_id": record["_id"], "reply": reply}

    async def _tool_calls(self, num_copied: dict[str, int]) -> list[Document]:
        """Return the calls of rollouts that a tool answered; not the copies in branches."""
        of_tools = ("tool_results.name", "tool_results.seconds", "tool_results.is_error")
        found = self._db.turns.find(
            {"record_id": {"$in": [*num_copied]}}, shown("record_id", "index", *of_tools)
        )
        return [
            {
                "record_id": turn["record_id"],
                "turn": turn["index"],
                "tool": result["name"],
                "seconds": result.get("seconds", 0.0),
                "is_error": result.get("is_error", False),
            }
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

    async def _tool_failures(self, record_ids: Sequence[str], limit: int) -> list[Document]:
        """Return what tools reported as errors; a call that could not be read is among them."""
        wrong: Document = {"$filter": {"input": "$tool_results", "cond": "$$this.is_error"}}
        text = {"$substrCP": ["$$this.content", 0, EXCERPT_CHARS]}
        results = {"$map": {"input": wrong, "in": {"tool": "$$this.name", "text": text}}}
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
            {"record_id": one["record_id"], "turn": one["index"], **each}
            for one in found
            for each in one["results"]
        ]

    @operation("read the means of questions")
    async def questions(self, split: Split, kind: QuestionKind, sort: str) -> Document:
        """Return the mean score of questions by time, and how many nobody or everybody solves.

        A time is an epoch, or the version that an evaluation asked. Training shows the newest
        groups; of evaluations, the first questions are shown completely.
        """
        found = await self._question_means(split)
        by_question: defaultdict[str, dict[int, Document]] = defaultdict(dict)
        for one in found:
            time, question = _time_and_question(one["task_id"])
            by_question[question][time] = one
        kinds = {question: _kind_of([*times.values()]) for question, times in by_question.items()}
        chosen = [question for question in by_question if kind in ("all", kinds[question])]
        chosen.sort(key=lambda question: (_sort_key(by_question[question], sort), question))
        rows = chosen[:QUESTIONS_SHOWN]
        newest = {question: by_question[question][max(by_question[question])] for question in rows}
        texts = await self.question_texts([one["task_id"] for one in newest.values()])
        times = sorted({time for question in rows for time in by_question[question]})[-_MAX_TIMES:]
        return {
            "is_cut": sum(one["num"] for one in found) >= QUESTION_KEYS,
            "num": len(by_question),
            "num_chosen": len(chosen),
            "counts": {
                name: [*kinds.values()].count(name) for name in ("nobody", "everybody", "some")
            },
            "times": times,
            "rows": [
                {
                    "question": question,
                    "text": texts.get(newest[question]["task_id"], "")[:_QUESTION_CHARS],
                    "kind": kinds[question],
                    "change": _change(by_question[question]),
                    "times": {
                        time: one for time, one in by_question[question].items() if time in times
                    },
                }
                for question in rows
            ],
            "ids": chosen[:_IDS_SHOWN] if kind != "all" else [],
        }

    async def _question_means(self, split: Split) -> list[Document]:
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
        return [{"task_id": one.pop("_id"), **one} for one in found]

    @operation("read the texts of questions")
    async def question_texts(self, task_ids: Sequence[str]) -> dict[str, str]:
        """Return the texts of questions by their ids."""
        found = self._db.tasks.find({"_id": {"$in": [*task_ids]}}, shown("query", "description"))
        return {one["_id"]: one.get("query") or one.get("description", "") async for one in found}

    @operation("read running rollouts")
    async def running(self, limit: int = RUNNING_SHOWN) -> list[Document]:
        """Return rollouts in progress and what they said last, the latest start first."""
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
                {
                    "record_id": one.pop("_id"),
                    **one,
                    "last_turn_at": turn.get("finished_at"),
                    "said": turn.get("said", ""),
                    "calls": turn.get("calls", []),
                }
            )
        return sorted(rollouts, key=lambda one: str(one["started_at"]), reverse=True)

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


def common_text(text: str) -> str:
    """Return an error without numbers and ids, so that its occurrences have equal texts."""
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+", "#", text)[:300]


def _shuffled(record_id: str) -> int:
    return zlib.crc32(record_id.encode())


def _spaced(last: int) -> list[int]:
    """Return steps at equal distances, the first and the last among them."""
    if last <= STEPS_SHOWN:
        return [*range(1, last + 1)]
    return sorted({1 + round(at * (last - 1) / (STEPS_SHOWN - 1)) for at in range(STEPS_SHOWN)})


def _tool_times(calls: Sequence[Document]) -> list[Document]:
    """Return the times of each tool, the tool with the most time in total first."""
    by_tool: defaultdict[str, list[Document]] = defaultdict(list)
    for call in sorted(calls, key=itemgetter("seconds")):
        by_tool[call["tool"]].append(call)
    found = []
    for tool, of_tool in by_tool.items():
        times = [call["seconds"] for call in of_tool]
        found.append(
            {
                "tool": tool,
                "num": len(times),
                "num_errors": sum(call["is_error"] for call in of_tool),
                "median": median(times),
                "p95": times[math.ceil(0.95 * len(times)) - 1],
                "total": sum(times),
                "slowest": of_tool[-1],
            }
        )
    return sorted(found, key=itemgetter("total"), reverse=True)


def _time_and_question(task_id: str) -> tuple[int, str]:
    """Return the epoch or version and the question, whose retries count as the question itself."""
    found = _TASK_ID.fullmatch(task_id)
    return (int(found["time"]), found["question"]) if found else (0, task_id)


def _kind_of(times: Sequence[Document]) -> QuestionKind:
    if max(one["high"] for one in times) <= 0:
        return "nobody"
    return "everybody" if min(one["low"] for one in times) >= 1 else "some"


def _change(times: dict[int, Document]) -> float:
    change: float = times[max(times)]["mean"] - times[min(times)]["mean"]
    return change


def _sort_key(times: dict[int, Document], sort: str) -> float:
    newest: float = times[max(times)]["mean"]
    keys = {"lost": _change(times), "gained": -_change(times), "high": -newest}
    return keys.get(sort, newest)

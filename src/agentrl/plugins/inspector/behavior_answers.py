"""What rollouts did as JSON values: sizes by step, questions by time, failures by kind, live ones.

Input: a store. Output: dictionaries, each with what it was computed from.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any, Literal

from agentrl.plugins.inspector.run_answers import common_text, consumer_of, run_of
from agentrl.runtime.invocation import typed_command
from agentrl.schema import Split
from agentrl.store import TrajectoryStore
from agentrl.store.views.behavior import (
    FAILURE_GROUPS,
    ROLLOUTS_A_STEP,
    TOOL_ROLLOUTS,
    TOOL_ROLLOUTS_A_STEP,
    QuestionTime,
    RolloutFacts,
    ToolCallTime,
    ToolFailure,
)

STEPS_SHOWN = 40
QUESTIONS_SHOWN = 200
_MAX_TIMES = 40
_IDS_SHOWN = 2000
_TASK_ID = re.compile(r"[^/]+/(?P<time>\d{1,9})/(?P<question>.+?)(~\d+)?", re.DOTALL)

QuestionKind = Literal["all", "nobody", "everybody", "some"]


async def distributions(store: TrajectoryStore) -> dict[str, Any]:
    """Return sizes and outcomes of rollouts at some steps of the run, as columns."""
    consumer = consumer_of(await run_of(store))
    last = await store.figures.last_steps(consumer, 1)
    steps = _spaced(last[0]["step"] if last else 0)
    facts = await store.behavior.of_steps(consumer, steps)
    return {
        "steps": steps,
        "rollouts_a_step": ROLLOUTS_A_STEP,
        "tool_rollouts_a_step": TOOL_ROLLOUTS_A_STEP,
        "columns": {name: [*map(attrgetter(name), facts)] for name in RolloutFacts.model_fields},
    }


def _spaced(last: int) -> list[int]:
    """Return steps at equal distances, the first and the last among them."""
    if last <= STEPS_SHOWN:
        return [*range(1, last + 1)]
    return sorted({1 + round(at * (last - 1) / (STEPS_SHOWN - 1)) for at in range(STEPS_SHOWN)})


async def failure_kinds(store: TrajectoryStore) -> dict[str, Any]:
    """Return the failures of the newest rollouts by kind, each with an example."""
    num_rollouts, kinds = await store.behavior.outcomes()
    by_text: defaultdict[tuple[str, str], list[ToolFailure]] = defaultdict(list)
    for failure in await store.behavior.tool_failures():
        by_text[failure.tool, common_text(failure.text)].append(failure)
    ordered = sorted(by_text.values(), key=len, reverse=True)
    return {
        "num_groups": FAILURE_GROUPS,
        "num_rollouts": num_rollouts,
        "kinds": [one.model_dump(mode="json") for one in kinds],
        "num_tool_rollouts": TOOL_ROLLOUTS,
        "times": _tool_times(await store.behavior.tool_call_times()),
        "tools": [{"num": len(found), **found[-1].model_dump(mode="json")} for found in ordered],
    }


def _tool_times(calls: Sequence[ToolCallTime]) -> list[dict[str, Any]]:
    """Return the times of each tool, the tool with the most time in total first."""
    by_tool: defaultdict[str, list[ToolCallTime]] = defaultdict(list)
    for call in calls:
        by_tool[call.tool].append(call)
    found = []
    for tool, of_tool in by_tool.items():
        of_tool.sort(key=attrgetter("seconds"))
        times = [call.seconds for call in of_tool]
        found.append(
            {
                "tool": tool,
                "num": len(times),
                "num_errors": sum(call.is_error for call in of_tool),
                "median": median(times),
                "p95": times[math.ceil(0.95 * len(times)) - 1],
                "total": sum(times),
                "slowest": of_tool[-1].model_dump(mode="json"),
            }
        )
    return sorted(found, key=itemgetter("total"), reverse=True)


async def questions(
    store: TrajectoryStore, split: Split, kind: QuestionKind, sort: str
) -> dict[str, Any]:
    """Return the mean score of questions by time, and how many nobody or everybody solves."""
    found, is_cut = await store.behavior.question_times(split)
    by_question: defaultdict[str, dict[int, QuestionTime]] = defaultdict(dict)
    for one in found:
        time, question = _time_and_question(one.task_id)
        by_question[question][time] = one
    kinds = {question: _kind_of([*times.values()]) for question, times in by_question.items()}
    chosen = [question for question in by_question if kind in ("all", kinds[question])]
    chosen.sort(key=lambda question: (_sort_key(by_question[question], sort), question))
    rows = chosen[:QUESTIONS_SHOWN]
    newest = {question: by_question[question][max(by_question[question])] for question in rows}
    texts = await store.behavior.question_texts([one.task_id for one in newest.values()])
    times = sorted({time for question in rows for time in by_question[question]})[-_MAX_TIMES:]
    return {
        "is_cut": is_cut,
        "num": len(by_question),
        "num_chosen": len(chosen),
        "counts": {name: [*kinds.values()].count(name) for name in ("nobody", "everybody", "some")},
        "times": times,
        "rows": [
            {
                "question": question,
                "text": texts.get(newest[question].task_id, "")[:300],
                "kind": kinds[question],
                "change": _change(by_question[question]),
                "times": {
                    time: one.model_dump(mode="json")
                    for time, one in by_question[question].items()
                    if time in times
                },
            }
            for question in rows
        ],
        "ids": chosen[:_IDS_SHOWN] if kind != "all" else [],
        "commands": _commands(store.database_name, kind),
    }


def _time_and_question(task_id: str) -> tuple[int, str]:
    """Return the epoch or version and the question, whose retries count as the question itself."""
    found = _TASK_ID.fullmatch(task_id)
    return (int(found["time"]), found["question"]) if found else (0, task_id)


def _kind_of(times: Sequence[QuestionTime]) -> QuestionKind:
    if max(one.high for one in times) <= 0:
        return "nobody"
    return "everybody" if min(one.low for one in times) >= 1 else "some"


def _change(times: dict[int, QuestionTime]) -> float:
    return times[max(times)].mean - times[min(times)].mean


def _sort_key(times: dict[int, QuestionTime], sort: str) -> float:
    newest = times[max(times)].mean
    keys = {"lost": _change(times), "gained": -_change(times), "high": -newest}
    return keys.get(sort, newest)


def _commands(run_name: str, kind: QuestionKind) -> list[list[str]]:
    """Return what to do with questions that teach nothing: sentence and command."""
    option = ("--run_name", run_name)
    add = typed_command("tasks", "add", "--train_file", "QUESTIONS.jsonl", *option)
    if kind == "nobody":
        return [
            [
                "Read what the model answers: a scorer or an answer format may be at fault.",
                typed_command("inspect", "records", "--score", "<=0", *option),
            ],
            ["Add easier questions of the same kind, which are solved sometimes.", add],
            [
                "Ask questions again whose rollouts failed for reasons of the machines.",
                typed_command("tasks", "retry", *option),
            ],
        ]
    if kind == "everybody":
        return [
            ["Add harder questions: these have equal scores and no gradient.", add],
            [
                "See what is left to ask before you leave these out of --train_file.",
                typed_command("tasks", "stats", *option),
            ],
        ]
    return []


async def run_tabs(store: TrajectoryStore) -> dict[str, Any]:
    """Return what the run has pages for."""
    last = await store.figures.last_steps(consumer_of(await run_of(store)), 1)
    return {
        "last_step": last[0]["step"] if last else 0,
        "has_evaluations": await store.behavior.has_evaluations(),
        "is_running": bool(await store.behavior.running(1)),
        "has_forks": bool(await store.forks.newest(1)),
    }


async def live_rollouts(store: TrajectoryStore) -> dict[str, Any]:
    """Return the rollouts in progress."""
    return {"rollouts": [one.model_dump(mode="json") for one in await store.behavior.running()]}

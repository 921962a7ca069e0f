"""Turns of an ended run as a source of tasks: `--env stored:RUN?where=CONDITION&solved=0.2-0.8`.

See `agentrl.datasets.task_source`. The run's database is read when the tasks are made, also when their
run is resumed; each task then holds the turns that its rollouts start from, so samplers never need it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from agentrl.cli.databases import opened_store, trained_run
from agentrl.config.loading import load_config
from agentrl.config.sections import DataSection, RootConfig
from agentrl.datasets.question import Question
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import ConfigError
from agentrl.inference.teaching.vocabularies import check_same_tokens
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.models.checkpoints.resolve import resolve_tokenizer
from agentrl.plugins.stored_turns.parting_states import PartingState, parting_states, scores_part
from agentrl.rollout.worker.branching import check_tools_can_branch
from agentrl.rollout.worker.resources import tools_config
from agentrl.runtime.printable import counted
from agentrl.schema import ENDED_RUNS, DispatchedSamplingTask, MCPTask, Record, Split
from agentrl.schema.stored_start import StoredStart
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document
from agentrl.store.views.record_condition import record_condition

KIND = "stored"
_SOLVED = "0.2-0.8"
_MAX_RECORDS = 20_000
_GROUPS_AT_ONCE = 64
_NOT_GIVEN: Mapping[str, Any] = {
    "trainable": False,
    "version_spans": (),
    "teacher_logprobs": {},
    "routed_experts": b"",
    "reward": None,
    "advantage": None,
    "snapshot": "",
}
"""What a turn loses that is given to the rollouts of another run."""
_Parted = tuple[MCPTask, list[PartingState]]
"""A question on which attempts differ, and the states behind it where their scores part."""


@dataclass(frozen=True)
class StoredUri:
    """Which turns of which run."""

    run: str
    """Its name, or its output directory."""
    condition: Document
    """On its records, as MongoDB's filter; empty: all."""
    solved: tuple[float, float]
    """Lowest and highest share of right attempts through a state."""

    @classmethod
    def parse(cls, text: str, flag: str) -> "StoredUri":
        """Return what a text names.

        Raises:
            ConfigError: it names no run, has other parameters, or is to be evaluated.
        """
        if flag != "--env":
            raise ConfigError(
                f"{flag} {text}: evaluations ask whole questions; give a file of them"
            )
        run, _, query = text.removeprefix(f"{KIND}:").partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        given = dict(pairs)
        if not run or len(given) < len(pairs) or not given.keys() <= {"where", "solved"}:
            raise ConfigError(
                f"{flag} {text}: write stored:RUN, or stored:RUN?where=CONDITION&solved=0.2-0.8 with "
                "either parameter or both (+ stands for a space)"
            )
        try:
            low, high = map(float, given.get("solved", _SOLVED).split("-"))
        except ValueError:
            low, high = 0.0, -1.0
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"{flag} {text}: solved is two shares of 1, such as {_SOLVED}")
        condition = record_condition(given["where"]) if "where" in given else {}
        return cls(run, condition, (low, high))

    def config(self) -> RootConfig:
        """Return the configuration of the run."""
        config = trained_run(load_config({}), self.run)
        if not config.private_mongo_dir.is_dir():
            return config
        # The environment's URI is that of the run that is starting.
        section = config.store.model_copy(update={"db_connection_string": None})
        return config.model_copy(update={"store": section})


class StoredSource:
    """Questions of a run on which attempts differ, each from where their scores part, epoch by epoch."""

    starts_programs = False

    def can_branch(self, uri: str, flag: str) -> bool:
        """Return True: its tasks are those of tool servers, which are checked by themselves."""
        StoredUri.parse(uri, flag)
        return True

    def num_tasks(self, uri: str, config: DataSection, flag: str) -> int:
        """Return on how many questions of the run attempts differ."""
        return len(_read(StoredUri.parse(uri, flag), f"{flag} {uri}"))

    def tasks(
        self, uri: str, config: DataSection, split: Split, *, seed: int, **stream: Any
    ) -> Iterator[MCPTask]:
        """Yield the questions, from their last states in the first epoch, then further back."""
        parsed = StoredUri.parse(uri, "--env" if split == "train" else "--eval_env")
        found = _read(parsed, f"--env {uri}")
        asked = {f"{KIND}-{task.dataset_id}": (task, states) for task, states in found}
        questions = [_question(name, task) for name, (task, _) in asked.items()]
        run = parsed.config().run.run_name
        for task in tasks_from_questions(questions, split, **stream):
            _, states = asked[task.dataset_id]
            if task.epoch < len(states):
                task = task.model_copy(update={"start": _start(run, states[task.epoch])})
            yield task

    def samplers(self, config: DataSection, endpoints: Any) -> AbstractContextManager[Any]:
        """Never called: its tasks are those of tool servers."""
        raise NotImplementedError


STORED = StoredSource()


def check_start(config: RootConfig, gpus: GpuMap, model_path: Path) -> str | None:
    """Check that rollouts of the run's model and tools can start at the turns of another run.

    Raises:
        ConfigError: they cannot.
    """
    uri = config.data.env or ""
    if uri.startswith(f"{KIND}:"):
        check_tools_can_branch(config, tools_config(config.tools), f"--env {uri}")
        origin = StoredUri.parse(uri, "--env").config()
        theirs = resolve_tokenizer(origin.model.model_name_or_path)
        ours = resolve_tokenizer(config.model.model_name_or_path)
        check_same_tokens(f"--env {uri}", theirs, ours)
    return None


def _read(uri: StoredUri, given: str) -> list[_Parted]:
    """Return questions of a run with their states, in the order in which they were asked."""
    # Checks call from a thread with an event loop, and feeds from one without.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_collected(uri, given))).result()


async def _collected(uri: StoredUri, given: str) -> list[_Parted]:
    async with opened_store(uri.config()) as store:
        if await store.reports.state() not in {*ENDED_RUNS, "interrupted"}:
            raise ConfigError(
                f"{given}: the run goes on, and its records with it; wait for its end"
            )
        condition = {"split": "train", "status": "scored", "branch": None, **uri.condition}
        records = await store.reports.sampled_near(condition, None, limit=_MAX_RECORDS)
        found: dict[str, _Parted] = {}
        async for task, states in _parted(store, records, uri.solved, given):
            # A question that was asked in several epochs starts from its latest attempts.
            found.setdefault(task.dataset_id, (task, states))
    if not found:
        raise ConfigError(
            f"{given}: no group of {counted(len(records), 'scored record')} has right and wrong attempts; "
            "widen where, or train from the questions"
        )
    return list(reversed(found.values()))


async def _parted(
    store: TrajectoryStore, records: Sequence[Record], solved: tuple[float, float], given: str
) -> AsyncIterator[_Parted]:
    """Yield the groups whose attempts differ, the latest first."""
    groups = [list(group) for _, group in groupby(records, attrgetter("task_id"))]
    groups = [group for group in groups if scores_part(group)]
    for first in range(0, len(groups), _GROUPS_AT_ONCE):
        some = {group[0].task_id: group for group in groups[first : first + _GROUPS_AT_ONCE]}
        turns: dict[str, list[DispatchedSamplingTask]] = {
            record.id: [] for group in some.values() for record in group
        }
        for turn in await store.turns.of_records(list(turns)):
            turns[turn.record_id].append(turn)
        for task in await store.tasks.get_many(list(some)):
            if type(task) is not MCPTask or task.start is not None:
                what = "starts at turns of a run" if task.start else f"is of kind {task.kind!r}"
                raise ConfigError(
                    f"{given}: {task.id} {what}, whose state cannot be restored; only rollouts that "
                    "began at a question to tool servers can be continued"
                )
            yield task, parting_states(some[task.id], turns, solved)


def _question(name: str, task: MCPTask) -> Question:
    return Question(
        id=name,
        query=task.query,
        answer=task.answer,
        aug_answers=task.aug_answers,
        scorer=task.scorer,
        answer_schema=task.answer_schema,
        system_prompt=task.system_prompt,
        tags=task.tags,
        images=task.images,
        columns=task.columns,
    )


def _start(run: str, state: PartingState) -> StoredStart:
    own = {"model": f"{run}@{state.record.max_version}", **_NOT_GIVEN}
    *before, last = state.turns
    turns = (*(turn.model_copy(update=own) for turn in before), last)
    return StoredStart(
        run=run, record_id=state.record.id, share_right=state.share_right, turns=turns
    )

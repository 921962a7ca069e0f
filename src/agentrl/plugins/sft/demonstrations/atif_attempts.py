"""Harbor's trajectories (ATIF) as attempts at tasks, with question, answer and score.

Input: untrusted files. Output: for each task its attempts, checked before
anything is stored, or a `DatasetError` with the position of the first mistake.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.datasets.entries import BadEntry
from agentrl.errors import DatasetError
from agentrl.plugins.sft.demonstrations.atif_documents import (
    OURS,
    AtifTrajectory,
    own_facts,
    read_trajectories,
)
from agentrl.plugins.sft.demonstrations.atif_turns import turns_of
from agentrl.schema import DispatchedSamplingTask, MCPTask, Outcome, Score
from agentrl.schema.task import id_of_task

_MAX_GROUP = 4096
_TASK_ID = re.compile(r"(train|eval|test|valid)/\d{1,9}/[\w./:@+-]{1,200}")
_INVALID_ID_CHARS = re.compile(r"[^\w.:@+-]+")
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def check_trajectories(path: Path) -> None:
    """Refuse files without trajectories, or with one that cannot be imported.

    Raises:
        DatasetError: a file is invalid; the message names the problem and its place.
    """
    for _, attempts in attempts_by_task(path):
        for attempt in attempts:
            attempt.turns("check/0/0/0", "check/0/0", 1)


@dataclass(frozen=True)
class AtifAttempt:
    """One trajectory as an attempt at a task; its methods refuse what cannot be stored."""

    where: str
    trajectory: AtifTrajectory

    @property
    def facts(self) -> Mapping[str, Any]:
        """AgentRL's own fields, present in exports of AgentRL."""
        return own_facts(self.trajectory.extra)

    def task_id(self) -> str:
        """Return the id of its task: from an export of AgentRL, else a derived one."""
        given = self.facts.get("task")
        if isinstance(given, str) and _TASK_ID.fullmatch(given):
            return given
        name = self.trajectory.trajectory_id or self.trajectory.session_id or self.where
        return id_of_task("train", 0, _INVALID_ID_CHARS.sub("_", name)[-200:])

    def task(self, task_id: str, order: int, num_generations: int) -> MCPTask:
        """Return the task that it is an attempt at."""
        question = self.facts.get("question")
        if not isinstance(question, Mapping):
            user_steps = [step for step in self.trajectory.steps if step.source == "user"]
            query = (
                user_steps[0].message
                if user_steps and isinstance(user_steps[0].message, str)
                else ""
            )
            question = {"query": query, "scorer": "imported"}
        split = task_id.partition("/")[0]
        fields = {"id": task_id, "split": split, "num_generations": num_generations}
        try:
            return MCPTask.model_validate(
                {**question, **fields, "order": order if split == "train" else -1 - order}
            )
        except ValidationError as error:
            raise self.problem(f"extra.{OURS}.question: {error.errors()[0]['msg']}") from None

    def score(self, otherwise: float | None) -> Score | None:
        """Return its score, or `otherwise` if it has none."""
        given = self.facts.get("score")
        if given is None:
            return None if otherwise is None else Score(scorer="imported", value=otherwise)
        try:
            return Score.model_validate(given)
        except ValidationError as error:
            raise self.problem(f"extra.{OURS}.score: {error.errors()[0]['msg']}") from None

    def outcome(self) -> Outcome:
        """Return its outcome; trajectories from other tools have none, and count as answered."""
        given = self.facts.get("outcome") or "answered"
        try:
            return _OUTCOME.validate_python(given)
        except ValidationError:
            raise self.problem(f"extra.{OURS}.outcome: {str(given)[:40]!r} is not known") from None

    def answer(self) -> str | None:
        """Return its final answer: from an export of AgentRL, else the last message."""
        if "final_answer" in self.facts:
            given = self.facts["final_answer"]
            return None if given is None else str(given)
        agent_steps = [step for step in self.trajectory.steps if step.source == "agent"]
        last = agent_steps[-1].message if agent_steps else None
        return last if isinstance(last, str) else None

    def turns(self, record_id: str, task_id: str, fence: int) -> list[DispatchedSamplingTask]:
        """Return its turns; see `turns_of`."""
        try:
            return turns_of(self.trajectory, record_id, task_id, fence)
        except BadEntry as problem:
            raise self.problem(str(problem)) from None

    def problem(self, text: str) -> DatasetError:
        """Return the error that names its place."""
        return DatasetError(f"{self.where}: {text}")


def attempts_by_task(path: Path) -> Iterator[tuple[str, list[AtifAttempt]]]:
    """Yield each task's id and its attempts, which must be consecutive in the files.

    Args:
        path: a file or a folder; see `read_trajectories`.

    Raises:
        DatasetError: there are none, or one is malformed; the message names the place.
    """
    seen: set[str] = set()
    attempts = (AtifAttempt(where, trajectory) for where, trajectory in read_trajectories(path))
    for task_id, group in itertools.groupby(attempts, key=AtifAttempt.task_id):
        found = list(itertools.islice(group, _MAX_GROUP + 1))
        if task_id in seen:
            raise found[0].problem(
                f"task {task_id} occurs twice; its trajectories must be consecutive"
            )
        if len(found) > _MAX_GROUP:
            raise found[0].problem(f"task {task_id} has more than {_MAX_GROUP} trajectories")
        seen.add(task_id)
        for attempt in found:  # validates before anything is written
            attempt.task(task_id, 0, 1)
            attempt.score(None)
            attempt.outcome()
        yield task_id, found
    if not seen:
        raise DatasetError(f"{path} contains no trajectory")

"""Environments of other projects as a source of tasks; see `agentrl.datasets.task_source`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.question import Question, question_of
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import DatasetError
from agentrl.plugins.environments.environment_process import EnvironmentProcess
from agentrl.plugins.environments.environment_sampler import EnvironmentProcesses
from agentrl.plugins.environments.environment_uri import ENVIRONMENTS, EnvironmentUri
from agentrl.rollout.agent import AgentEndpointServer
from agentrl.schema import EnvironmentTask, Split

_ROWS_PER_REQUEST = 64


class EnvironmentSource:
    """One kind of environment."""

    def __init__(self, kind: str) -> None:
        self.starts_programs = ENVIRONMENTS[kind].starts_programs
        """Whether its rollouts start their own programs."""

    def can_branch(self, uri: str, flag: str) -> bool:
        """Return whether a rollout of an environment can start at a turn of another."""
        return EnvironmentUri.parse(uri, flag).is_replayable

    def num_tasks(self, uri: str, config: DataSection, flag: str) -> int:
        """Return how many tasks an environment has."""
        parsed = EnvironmentUri.parse(uri, flag)
        with EnvironmentProcess(parsed, config, flag, quiet=True) as environment:
            return environment.size()

    def tasks(
        self, uri: str, config: DataSection, split: Split, *, seed: int, **stream: Any
    ) -> Iterator[EnvironmentTask]:
        """Yield the tasks of an environment."""
        flag = "--env" if split == "train" else "--eval_env"
        parsed = EnvironmentUri.parse(uri, flag)
        if parsed.is_seeded:
            parsed.args.setdefault("seed", seed)
        questions: list[Question] = []
        with EnvironmentProcess(parsed, config, flag) as environment:
            numbers = range(environment.size())
            for start in numbers[::_ROWS_PER_REQUEST]:
                rows = environment.rows(numbers[start : start + _ROWS_PER_REQUEST])
                for number, row in enumerate(rows, start):
                    own = {"id": f"{parsed.id_prefix}-{number}"}
                    scored = {"scorer": config.env_scorer or "reported"}
                    entry = {**own, **row, **scored} if isinstance(row, dict) else row
                    try:
                        questions.append(question_of(entry, config, f"row {number}", None))
                    except BadEntry as problem:
                        raise DatasetError(
                            f"{flag} {parsed.env_id}: row {number}: {problem}"
                        ) from None
        rows_by_id = {question.id: number for number, question in enumerate(questions)}
        for task in tasks_from_questions(questions, split, **stream):
            yield EnvironmentTask(
                **dict(task),
                env_id=parsed.env_id,
                args=parsed.args,
                row=rows_by_id[task.dataset_id],
            )

    @contextmanager
    def samplers(self, config: DataSection, endpoints: AgentEndpointServer) -> Iterator[Any]:
        """Keep the environments' processes running, each from its first task on."""
        with EnvironmentProcesses.open(config, endpoints) as processes:
            yield processes.sampler


REASONING_GYM = EnvironmentSource("reasoning_gym")
TEXTARENA = EnvironmentSource("textarena")
VERIFIERS = EnvironmentSource("verifiers")
OPENENV = EnvironmentSource("openenv")
HARBOR = EnvironmentSource("harbor")
BFCL = EnvironmentSource("bfcl")

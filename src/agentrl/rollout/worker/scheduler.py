"""`SamplingScheduler`: samples a run with the registered sampler classes or the user's own."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from agentrl.config.sections import DataSection, RootConfig
from agentrl.errors import ConfigError
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.rollout.context import RolloutContext, Scoring, Summarizer
from agentrl.rollout.mcp_sampler import MCPSampler
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.branching import check_scorer_of_trees
from agentrl.rollout.worker.resources import open_context
from agentrl.rollout.worker.sampling_loop import LoopState, SamplingLoop
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.runtime.processes.signals import INTERRUPTED, signal_events
from agentrl.schema import EnvironmentTask, MCPTask, Record, Split, Task
from agentrl.store import TrajectoryStore

log = logging.getLogger(__name__)

SamplerClass = type[AsyncSampler[Any]]
_Class = TypeVar("_Class", bound=SamplerClass)

_SAMPLERS: dict[type[Task], SamplerClass] = {MCPTask: MCPSampler}


def register_sampler(task_class: type[Task]) -> Callable[[_Class], _Class]:
    """Run tasks of `task_class` and its subclasses with the decorated sampler class."""

    def register(sampler_class: _Class) -> _Class:
        _SAMPLERS[task_class] = sampler_class
        return sampler_class

    return register


def sampler_class_for(task: Task) -> SamplerClass:
    """Return the sampler class registered for the nearest of the task's classes.

    Raises:
        ConfigError: no sampler class is registered for this kind of task.
    """
    if isinstance(task, EnvironmentTask):
        raise ConfigError(
            f"task {task.id} belongs to environment {task.env_id}; start the sampler with --env "
            f"{task.env_id}"
        )
    for cls in type(task).__mro__:
        if cls in _SAMPLERS:
            return _SAMPLERS[cls]
    raise ConfigError(
        f"task {task.id} has kind {task.kind!r}, which has no registered sampler class (register one "
        "with agentrl.rollout.register_sampler)"
    )


class SamplingScheduler:
    """Claims slots, runs and scores their rollouts, and renews their leases.

    `run` returns when the run is completed or failed, when no work is left and `exit_when_done` is
    set, or after SIGTERM or SIGINT. On the first signal it stops claiming, gives running rollouts
    `drain_seconds`, and releases the slots of the others, which does not count as an attempt. On
    the second signal it exits at once and leaves the leases to expire.

    Args:
        config: the process's configuration.
        sampler_class: makes a slot's rollout: a class, or a function of the same arguments; by
            default the class registered for the task's kind.
        dataset: tasks to add to the run first (idempotent, by their ids).
        split: claim only slots of this split; None means any.
        scoring: the scorers, needed by `MCPSampler`.
        summarizer: shortens long texts, for `MCPSampler`; None leaves them unchanged.
        notice: returns a message about the process for people, or "".

    Raises:
        ConfigError: `config` is not the configuration of this process.
    """

    def __init__(
        self,
        config: RootConfig,
        sampler_class: MakeSampler | None = None,
        dataset: Iterable[Task] | None = None,
        split: Split | None = None,
        *,
        scoring: Scoring | None = None,
        summarizer: Summarizer | None = None,
        notice: Callable[[], str] = str,
    ) -> None:
        if not isinstance(config, RootConfig):
            raise ConfigError(
                f"SamplingScheduler: config is a {type(config).__name__}; pass "
                "agentrl.config.command_line.parse_flags(sys.argv[1:])"
            )
        self.owner = new_lease_owner()
        self._config = config
        self._make_sampler = sampler_class or _registered_sampler
        self._dataset = dataset
        self._splits: Collection[Split] | None = None if split is None else (split,)
        self._scoring = scoring
        self._summarizer = summarizer
        self._notice = notice
        self._stop = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._loop: SamplingLoop | None = None

    @property
    def state(self) -> LoopState | None:
        """Current work of the sampler; None before it starts. Readable from any thread."""
        return None if self._loop is None else self._loop.state

    async def run(self) -> int:
        """Sample until the run ends or the process is stopped; return the exit status.

        Raises:
            ConfigError: the configuration names something that does not exist or is not reachable.
            StoreError: the store was unavailable for too long.
        """
        log.info("joining run %s", self._config.run.run_name)
        with signal_events("claiming no new slots", self._stop, self._abandoned):
            async with open_context(self._config, self._scoring, self._summarizer) as context:
                if self._dataset is not None:
                    log.info("%d new tasks", await context.store.tasks.add(self._dataset))
                await check_environments(context.store, self._config.data)
                await self._check_scorers(context.store)
                self._loop = SamplingLoop(
                    context, self.owner, self._make_sampler, self._splits, notice=self._notice
                )
                await self._loop.run(self._stop, self._abandoned)
        return INTERRUPTED if self._abandoned.is_set() else 0

    async def _check_scorers(self, store: TrajectoryStore) -> None:
        """Refuse tasks that could be sampled but not scored; later ones are checked individually."""
        if self._scoring is None or self._config.rollout.scoring == "elsewhere":
            return
        for scorer in await store.tasks.open_scorers(self._splits):
            self._scoring.check(scorer)
            if self._config.data.rounds:
                check_scorer_of_trees(self._scoring, scorer)

    def stop(self) -> None:
        """Request a graceful stop; the second call stops immediately."""
        (self._abandoned if self._stop.is_set() else self._stop).set()


async def check_environments(store: TrajectoryStore, data: DataSection) -> None:
    """Refuse tasks of an imported run whose environments, and thus programs, the user has not named."""
    run = await store.runs.get()
    if run is None or not run.is_imported:
        return
    given = {uri.partition("?")[0] for uri in data.environments.values()}
    for env_id in await store.tasks.open_environments():
        if env_id not in given:
            raise ConfigError(
                f"run {run.name!r} was imported, and its tasks belong to environment {env_id}; if "
                f"you trust it, start the run with --env {env_id}"
            )


def _registered_sampler(task: Task, record: Record, context: RolloutContext) -> AsyncSampler[Any]:
    return sampler_class_for(task)(task, record, context)

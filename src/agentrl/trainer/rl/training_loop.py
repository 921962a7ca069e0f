"""The trainer of a run: `train(config)` on every rank, and the loop over its steps on rank 0.

    groups ──reserve──> build_step ──> forward_backward ──> optim_step ──(every save_steps)──> commit
      ^                                                                                          │
      └── admission <── servers updated <── version announced <──────── publish <────────────────┘

`TrainingRun` has these operations, and `train_steps` is the product's own loop over them; a loop of
the user's calls the same ones (`agentrl.open_run`). After a crash at any point, the run resumes from
the last checkpoint; records reserved after it become ready again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.loading import build_config, flat_values
from agentrl.config.own_function import with_sources
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.data import StepBatch, build_training_step
from agentrl.data.rows import Merge
from agentrl.datasets.task_stream import eval_tasks
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError, TrainingError
from agentrl.evaluation.eval_scores import EvalMetrics
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.schema import Record
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.after_step import call_after_step
from agentrl.trainer.bootstrap import ending_ranks_on_error, run_on_ranks
from agentrl.trainer.learner.function_trial import reference_of
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.merging import built_step, merge_error, with_exact_merge
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.metrics.measures import check_finite, check_last_steps
from agentrl.trainer.rl.evaluations import Evaluations, ask
from agentrl.trainer.rl.past_groups import group_reader
from agentrl.trainer.rl.run_start import (
    OpenedRun,
    TrainingSession,
    learner_settings,
    opened_run,
    state_to_resume,
    training_session,
)
from agentrl.trainer.rl.run_upkeep import (
    PhaseReporter,
    TrainResult,
    has_no_signal,
    report_end,
    retain,
)
from agentrl.trainer.rl.run_versions import RunVersions, beside_servers
from agentrl.trainer.rl.step_groups import GroupReader, StepGroups
from agentrl.trainer.rl.step_report import log_step, step_metrics, turn_trainings

logger = logging.getLogger(__name__)


def train(config: RootConfig) -> TrainResult | None:
    """Train a run, or resume it from its newest checkpoint.

    Args:
        config: the resolved configuration; components receive their sections from here.

    Returns:
        The result; None on ranks other than 0.

    Raises:
        ConfigError: a flag or file cannot be used; neither database nor files were changed.
        TrainerBusy: another trainer is working on this run.
        StoreError: the store failed, or an evaluation did not finish in time.
        TrainingError: losses or gradients stay non-finite, or GPUs that servers share are too small.
    """
    with beside_servers(config):
        return run_on_ranks("trainer", config, lambda ranks, stop: lead(config, ranks, stop=stop))


async def lead(config: RootConfig, ranks: Ranks, *, stop: asyncio.Event) -> TrainResult:
    """Run rank 0's part of `train` in a running event loop."""
    async with opened_training(config, ranks, stop=stop) as run:
        await train_steps(run)
    assert run.result is not None
    return run.result


async def train_steps(run: "TrainingRun") -> None:
    """Make the steps of a run, as its flags say."""
    async for groups in run.groups():
        batch = await run.build_step(groups)
        if not await run.finished_gradients(batch):
            return
        await run.learner.optim_step()
        # A signal lets the step end: its first update cannot be taken back.
        for _ in range(1, run.updates_per_step):
            await run.learner.forward_backward(batch)
            await run.learner.optim_step()
        if run.is_commit_due:
            await run.commit()
        await run.publish()


@asynccontextmanager
async def opened_training(
    config: RootConfig, ranks: Ranks, *, stop: asyncio.Event
) -> AsyncIterator["TrainingRun"]:
    """Open a run, yield it for the loop over its steps, and end it with its report."""
    async with AsyncExitStack() as stack:
        with ending_ranks_on_error(ranks):
            opened = await stack.enter_async_context(opened_run(config, ranks.shape.dp_size, stop))
            settings = learner_settings(config, opened.checkpoint, ranks.shape)
            settings = await asyncio.to_thread(with_exact_merge, settings, ranks.shape)
            state_path = state_to_resume(opened.checkpoint, config.trainer.max_steps)
        session = await stack.enter_async_context(
            training_session(
                config, ranks, settings, opened.checkpoint, state_path=state_path, stop=stop
            )
        )
        last_step = session.history.last_step
        logger.info("run %s: %d step(s) done so far", config.run.run_name, last_step)
        reader = await group_reader(opened, config, settings.weights.model_path)
        run = TrainingRun(session, config, opened, reader)
        if config.trainer.consumer == DEFAULT_CONSUMER:
            await opened.store.runs.set_config(with_sources(flat_values(config)), last_step)
        async with run._in_progress():
            yield run


class RunLearner:
    """The model and its optimizer, on all ranks."""

    def __init__(
        self, session: TrainingSession, config: RootConfig, store: TrajectoryStore
    ) -> None:
        """Start without gradients, with the loss of the flags.

        Args:
            session: the ranks, and the run's history.
            config: the resolved configuration.
            store: keeps the losses that a loop names.
        """
        self._session = session
        self._flags = self._current = config
        self._store = store
        self.outcome: StepOutcome | None = None
        """Of the updates since the last `publish`."""
        self.num_done = 0
        """Steps before the one in progress, which determine the learning rate."""
        self._has_gradients = False

    async def forward_backward(
        self, batch: StepBatch, loss: str | Callable[..., Any] | None = None, **loss_args: Any
    ) -> float:
        """Add the gradients of a batch to those since the last `optim_step`.

        Args:
            batch: of `TrainingRun.build_step`.
            loss: in place of `--loss_calculator`: the same values, or a function of a file.
            loss_args: its keyword arguments, in place of `--loss_args`.

        Returns:
            The loss, with the weights of the tokens normalized over the batch.

        Raises:
            ConfigError: the loss cannot be used.
        """
        config = self._flags
        if loss is not None:
            values = {"loss_calculator": reference_of(loss), "loss_args": loss_args or None}
            config = build_config({**flat_values(config), **values})
        algorithm = await self._checked(config)
        self._has_gradients = True
        return await self._session.group.forward_backward(batch.micro_batches, algorithm)

    async def optim_step(self) -> StepOutcome:
        """Apply the gradients since the last call; return the outcome of the step's updates so far."""
        if not self._has_gradients:
            raise TrainingError("no gradients: await forward_backward(batch) before optim_step()")
        self._has_gradients = False
        outcome = await self._session.group.optim_step(self.num_done)
        self.outcome = outcome.after(self.outcome)
        return self.outcome

    async def _checked(self, config: RootConfig) -> AlgorithmSection:
        """Try a loss that the run did not use last on all ranks, and keep it with the run."""
        if config.algorithm != self._current.algorithm:
            problem = await self._session.group.problem_of_functions(config)
            if problem is not None:
                raise ConfigError(problem)
            if config.trainer.consumer == DEFAULT_CONSUMER:
                values = with_sources(flat_values(config))
                await self._store.runs.set_config(values, self._session.history.last_step)
            self._current = config
        return config.algorithm


class TrainingRun:
    """A run that this process trains: the operations of a loop over its steps."""

    def __init__(
        self, session: TrainingSession, config: RootConfig, run: OpenedRun, reader: GroupReader
    ) -> None:
        """Continue after the steps done so far.

        Args:
            session: the ranks, and the run's history and trackers.
            config: the resolved configuration.
            run: the run in its database.
            reader: reads the groups of its steps.
        """
        self._session = session
        self._group = session.group
        self._history = session.history
        self._config = config
        self._trainer = config.trainer
        self.store = run.store
        """The run's database."""
        self._consumer = config.trainer.consumer
        self.updates_per_step = config.algorithm.max_trained_count
        """How often a step updates the weights with its batch."""
        self._is_leading = self._consumer == DEFAULT_CONSUMER
        """Further consumers only read: they must not change the run's status, phase or admission."""
        self._versions = RunVersions(session, config, run)
        self._reader = reader
        self._phase = PhaseReporter(run.store)
        questions = eval_tasks(config.data, 0) if config.trainer.eval_strategy != "no" else []
        self._evaluations = Evaluations(
            session, run.store, questions, self._phase, self._versions.number
        )
        self._stop = session.stop
        self._started = time.monotonic()
        self.learner = RunLearner(session, config, run.store)
        """The model and its optimizer."""
        self._end = "full"
        self._groups: StepGroups | None = None
        """Of the step that is not published yet."""
        self._batch: StepBatch | None = None
        self._seconds: dict[str, float] = {}
        self._merge_error: float | None = None
        self._metrics: StepMetrics | None = None
        """Of the step that is concluded, but not published yet."""
        self._reports: asyncio.Task[None] | None = None
        self.result: TrainResult | None = None
        """Set once the run has ended."""

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._history.last_step

    @property
    def output_path(self) -> Path:
        """Directory of the run's output."""
        return self._session.output_path

    async def groups(self) -> AsyncIterator[StepGroups]:
        """Yield the finished groups of each step, reserved for it in the ledger.

        Ends after `--max_steps`, with the data, or after a signal.

        Raises:
            TrainingError: the last step was not published.
        """
        while not self._stop.is_set() and self.step < self._trainer.max_steps:
            groups = await self._read_groups(self.step + 1)
            self._end = groups.end
            if groups.end == "stopped" or not groups.usable:
                # Records reserved for an abandoned step are released by the next recovery.
                if groups.end == "data_ended":
                    self._history.groups_consumed += len(groups.groups)
                    self._history.add_tail(groups.dropped)
                return
            self._groups = groups
            self.learner.num_done = groups.step - 1
            yield groups
            if self._metrics is not None or self.step < groups.step:
                raise TrainingError(
                    f"step {groups.step} was not published; call publish() after optim_step()"
                )
            if groups.end != "full":
                return

    async def _read_groups(self, step: int) -> StepGroups:
        self._seconds = {}
        self._phase.enter("sampling")
        with self._history.timed("wait_samples", self._seconds):
            await self._reader.read_control()
            consumed = self._history.groups_consumed
            return await self._reader.read_step(step, groups_consumed=consumed, stop=self._stop)

    async def build_step(self, groups: StepGroups) -> StepBatch:
        """Merge, weight and pack the groups of a step as the flags say.

        Raises:
            TrainingError: with `verify_merge`, merging changes the gradient.
        """
        self._phase.enter("training")
        with self._history.timed("prepare", self._seconds):
            build = partial(self._build_batch, groups)
            batch = await asyncio.to_thread(built_step, build, self._session.trainer.merge)
        await self._versions.acquire_device(self._seconds)
        self._merge_error = None
        if self._trainer.verify_merge and groups.step % self._trainer.verify_merge == 0:
            with self._history.timed("verify", self._seconds):
                self._merge_error = await self._checked_merge(groups, batch)
        self._batch = batch
        return batch

    def _build_batch(self, groups: StepGroups, merge: Merge) -> StepBatch:
        return build_training_step(
            groups.groups,
            self._config.algorithm,
            policy_version=groups.step - 1,
            token_budget=self._trainer.max_tokens,
            merge=merge,
            num_ranks=self._group.dp_size,
            attention_cost=self._group.attention_cost,
        )

    async def _checked_merge(self, groups: StepGroups, batch: StepBatch) -> float | None:
        separate = await asyncio.to_thread(self._build_batch, groups, "none")
        check = await self._group.check_merge(batch.micro_batches, separate.micro_batches)
        return merge_error(check, groups.step, self.output_path)

    async def finished_gradients(self, batch: StepBatch) -> bool:
        """Add the gradients of a batch; return False if a signal ended that, as if there was no step."""
        return await self._group.unless_stopped(self.learner.forward_backward(batch), self._stop)

    @property
    def is_commit_due(self) -> bool:
        """Whether `--save_steps`, or the end of the run, asks for a checkpoint of this step."""
        step = self.step if self._groups is None else self._groups.step
        is_last = step == self._trainer.max_steps or self._end != "full" or self._stop.is_set()
        return is_last or step % self._trainer.save_steps == 0

    async def commit(self) -> None:
        """Save a checkpoint, and commit the step's records to the ledger as trained.

        Call it before `publish`, so that a crash does not take back weights that servers serve. The
        end of the run commits its last step.
        """
        self._phase.enter("publishing")
        self._conclude()
        await self._versions.commit(self._seconds)

    async def publish(self) -> StepMetrics:
        """Deliver the weights to the servers, admit further samples, and report the step.

        Raises:
            TrainingError: there was no `optim_step`, or losses stay non-finite.
        """
        self._phase.enter("publishing")
        step = self._conclude().step
        await self._versions.publish(self._seconds)
        with self._history.timed("publish", self._seconds):
            await self._admit()
        if self._reports is not None:
            await self._reports
        update = {"seconds": self._seconds, "time": time.time()}
        metrics = self._history.steps[-1].model_copy(update=update)
        self._history.steps[-1] = metrics
        self._groups = self._batch = self._metrics = self._reports = self.learner.outcome = None
        self._session.report(metrics)
        await call_after_step(self._trainer.on_step, metrics, self._versions.number(step))
        figures = metrics.model_dump(mode="json", exclude_none=True)
        await self.store.figures.put_step(self._consumer, figures)
        if step % self._trainer.logging_steps == 0:
            log_step(metrics, self._trainer.max_steps)
        await self._evaluations.run_if_due(step)
        return metrics

    def _conclude(self) -> StepMetrics:
        """Add the step to the history, once; its reports are written while it is published."""
        if self._metrics is not None:
            return self._metrics
        groups, batch, outcome = self._groups, self._batch, self.learner.outcome
        if groups is None or batch is None or outcome is None:
            raise TrainingError(
                "there is no new step: call build_step, forward_backward and optim_step first"
            )
        for phase, spent in outcome.seconds.items():
            self._history.add_seconds(phase, spent, self._seconds)
        self._history.groups_consumed += len(groups.groups)
        self._metrics = step_metrics(
            groups,
            batch.stats,
            outcome,
            num_ranks=self._group.num_ranks,
            seconds=self._seconds,
            merge_error=self._merge_error,
        )
        check_finite(self._history, groups.step, outcome, self.output_path)
        self._history.steps.append(self._metrics)
        trainings = turn_trainings(self._consumer, groups, batch, outcome)
        self._reports = asyncio.create_task(self.store.ledger.put_turn_trainings(trainings))
        return self._metrics

    async def evaluate(self) -> EvalMetrics | None:
        """Score the newest published weights on the questions of `--eval_file`.

        Returns:
            The scores; None after a signal.

        Raises:
            ConfigError: there are no questions.
            StoreError: the scores did not arrive in time.
        """
        return await self._evaluations.now(self.step)

    async def sample(self, question: str | dict[str, Any], num_samples: int = 1) -> list[Record]:
        """Let samplers hold conversations with the run's agent, tools and scorer; none is trained on.

        Args:
            question: a row as in `--train_file`, or its text.
            num_samples: number of conversations.

        Raises:
            ConfigError: the row has a mistake.
            StoreError: the conversations did not finish within `eval_timeout_seconds`.
        """
        row = {"query": question} if isinstance(question, str) else question
        return await ask(
            self.store,
            row,
            self._config.data,
            num_samples=num_samples,
            timeout_seconds=self._trainer.eval_timeout_seconds,
        )

    @asynccontextmanager
    async def _in_progress(self) -> AsyncIterator[None]:
        """Publish the weights to start with; in the end, write the last checkpoint and the reports."""
        background = [
            asyncio.create_task(self._reader.follow_control()),
            asyncio.create_task(retain(self.store, self._config)),
        ]
        if self._is_leading:
            background.append(asyncio.create_task(self._phase.report()))
        try:
            await self._begin()
            yield
            await self._finish()
        finally:
            if self._reports is not None:
                await end_tasks([self._reports])
            await self._evaluations.cancel()
            await self._versions.cancel()
            await end_tasks(background)

    async def _begin(self) -> None:
        step = self.step
        await self.store.ledger.recover(self._consumer, step)
        await self.store.figures.rewind(
            self._consumer,
            step,
            [one.model_dump(mode="json", exclude_none=True) for one in self._history.steps],
            [one.model_dump(mode="json", exclude_none=True) for one in self._history.evals],
        )
        await self._evaluations.restore()
        await self._versions.publish_first(leads=self._is_leading)
        await self._admit()
        if self._is_leading:
            await self.store.runs.set_status("training")
        await self._evaluations.run_if_due(step)

    async def _finish(self) -> None:
        """Write the last checkpoint if it is missing, evaluate, and write the reports."""
        if self.learner.outcome is not None:
            raise TrainingError(
                f"the loop ended after optim_step() without publish(); step {self.step + 1} is lost, "
                "and the next start repeats it"
            )
        status = await self._status()
        await self._versions.finish()
        await self._evaluations.finish()
        if status != "stopped" and not await self._evaluations.run_last(self.step):
            status = "stopped"  # the same command then resumes with the evaluation
        if status == "stopped" or self._groups is not None:
            await self.store.ledger.recover(self._consumer, self.step)
        if status != "stopped":
            check_last_steps(self._history)
        self._history.add_seconds("total", time.monotonic() - self._started)
        self.result = await report_end(self._session, self.store, status)
        logger.info("%s after step %d; see %s", status, self.step, self.result.summary_path)

    async def _status(self) -> str:
        if self._stop.is_set():
            return "stopped"
        if self._end == "full":
            return "completed"
        full = self._reader.control.groups_per_step
        return "no_signal" if await has_no_signal(self.store, self._consumer, full) else self._end

    async def _admit(self) -> None:
        await self._reader.read_control()
        await self._reader.admit(self._history.groups_consumed, self.step + 1)

"""The trainer of a run: `train(config)` on every rank, and the loop over its steps on rank 0.

    read groups ──reserve──> optimizer step ──> weights written ──(every save_steps)──> checkpoint
         ^                                                                                  │
         └── admission <── servers updated <── version announced <──────── ledger committed ┘

After a crash at any point, the run resumes from the last checkpoint; records reserved after it become
ready again. The loop decides order and timing; it computes nothing itself.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.algorithms.function_trial import try_functions
from agentrl.config.loading import flat_values
from agentrl.config.own_function import with_sources
from agentrl.config.sections import (
    RootConfig,
)
from agentrl.data import StepBatch, build_training_step
from agentrl.data.rows import Merge
from agentrl.datasets.task_stream import eval_tasks
from agentrl.distributed import Ranks
from agentrl.errors import StoreError, TrainingError
from agentrl.inference.weight_sync import PolicyPublisher, WriteFiles
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.schema import RunStatus
from agentrl.store import DEFAULT_CONSUMER
from agentrl.trainer.after_step import call_after_step
from agentrl.trainer.bootstrap import ending_ranks_on_error, run_on_ranks
from agentrl.trainer.checkpoint import (
    CheckpointSaver,
)
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.learner.loss_trial import try_loss
from agentrl.trainer.learner.merge_trial import with_exact_merge
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.metrics.measures import check_finite
from agentrl.trainer.metrics.reporting import (
    draw_rewards,
    summarize,
    write_merge_report,
    write_summary,
)
from agentrl.trainer.rl.colocation import SharedDevice, beside_servers
from agentrl.trainer.rl.evaluations import Evaluations
from agentrl.trainer.rl.run_phase import PhaseReporter
from agentrl.trainer.rl.run_start import OpenedRun, learner_settings, opened_run, publisher_of
from agentrl.trainer.rl.step_groups import GroupReader, RecordImages, StepGroups, image_reader
from agentrl.trainer.rl.step_report import log_step, step_metrics, turn_trainings
from agentrl.trainer.training_session import (
    TrainingSession,
    state_to_resume,
    training_session,
)

logger = logging.getLogger(__name__)

MIN_KEPT_SHARE = 0.1
"""Share of the groups that has to be trained on for a run to count as one that learned."""
_CONTROL_SECONDS = 1.0


@dataclass(frozen=True)
class TrainResult:
    """The result of a trainer process."""

    status: str
    """`completed` (max_steps done), `data_ended`, `no_signal` (hardly any group could be trained on) or
    `stopped` (by a signal)."""
    step: int
    """Optimizer steps done, resumed ones included."""
    output_path: Path
    summary_path: Path
    picture_path: Path


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
    try_functions(config.algorithm, config.trainer)
    try_loss(config.algorithm)
    with beside_servers(config):
        return run_on_ranks("trainer", config, lambda ranks, stop: lead(config, ranks, stop=stop))


async def lead(config: RootConfig, ranks: Ranks, *, stop: asyncio.Event) -> TrainResult:
    """Run rank 0's part of `train` in a running event loop.

    Args:
        config: the resolved configuration.
        ranks: this process, rank 0.
        stop: setting it ends the run after the current step, with a checkpoint.
    """
    async with AsyncExitStack() as stack:
        with ending_ranks_on_error(ranks):
            run = await stack.enter_async_context(opened_run(config, ranks.shape.dp_size, stop))
            settings = learner_settings(config, run.checkpoint, ranks.shape)
            settings = await asyncio.to_thread(with_exact_merge, settings, ranks.shape)
            state_path = state_to_resume(run.checkpoint, config.trainer.max_steps)
        session = await stack.enter_async_context(
            training_session(
                config, ranks, settings, run.checkpoint, state_path=state_path, stop=stop
            )
        )
        last_step = session.history.last_step
        logger.info("run %s: %d step(s) done so far", config.run.run_name, last_step)
        images = RecordImages(run.store, image_reader(settings.weights.model_path, config.model))
        loop = TrainLoop(session, config, run, images)
        if config.trainer.consumer == DEFAULT_CONSUMER:
            await run.store.runs.set_config(with_sources(flat_values(config)), last_step)
        result = await loop.run()
        logger.info("%s after step %d; see %s", result.status, result.step, result.summary_path)
        return result


class TrainLoop:
    """Drives the store, the ranks and the servers through the optimizer steps."""

    def __init__(
        self, session: TrainingSession, config: RootConfig, run: OpenedRun, images: RecordImages
    ) -> None:
        """Continue after the steps done so far.

        Args:
            session: the ranks, and the run's history and trackers.
            config: the resolved configuration.
            run: the run in its database.
            images: reads the images of its records.
        """
        self._session = session
        self._group = session.group
        self._history = session.history
        self._trainer = config.trainer
        self._algorithm = config.algorithm
        self._store = run.store
        self._control = run.control
        """Size and freshness of the steps; the database may change them."""
        self._consumer = config.trainer.consumer
        self._is_leading = self._consumer == DEFAULT_CONSUMER
        """Further consumers only read: they must not change the run's status, phase or admission."""
        self._publisher = publisher_of(run.store, config, session.group)
        self._device: SharedDevice | None = None
        if config.inference.colocated and isinstance(self._publisher, PolicyPublisher):
            self._device = SharedDevice(run.store, self._publisher, session.group)
        self._reader = GroupReader(
            run.store,
            images,
            algorithm=config.algorithm,
            trainer=config.trainer,
            seed=config.run.seed,
            more_may_come=config.rollout.enable_sampling,
            feed=run.feed,
        )
        self._phase = PhaseReporter(run.store)
        questions = eval_tasks(config.data, 0) if config.trainer.eval_strategy != "no" else []
        self._evaluations = Evaluations(session, run.store, questions, self._phase)
        self._stop = session.stop
        self._saver = CheckpointSaver(
            session.output_path,
            group=session.group,
            trainer=config.trainer,
            saved_step=session.history.last_step,
            on_saved=lambda step: run.store.ledger.commit(self._consumer, step),
        )
        self._started = time.monotonic()

    async def run(self) -> TrainResult:
        """Train until max_steps, until the data ends, or until a signal stops the run.

        Raises:
            TrainingError: losses or gradients stay non-finite.
            StoreError: the store failed, or an evaluation did not finish in time.
        """
        background = [asyncio.create_task(self._follow_control())]
        if self._is_leading:
            background.append(asyncio.create_task(self._phase.report()))
        try:
            return await self._train()
        finally:
            await end_tasks(background)

    async def _train(self) -> TrainResult:
        step = self._history.last_step
        await self._store.ledger.recover(self._consumer, step)
        await self._store.figures.rewind(
            self._consumer,
            step,
            [one.model_dump(mode="json", exclude_none=True) for one in self._history.steps],
            [one.model_dump(mode="json", exclude_none=True) for one in self._history.evals],
        )
        await self._evaluations.restore()
        if self._is_leading:
            await self._note_lost_versions(step)
        with self._history.timed("publish"):
            await self._group.export(self._publisher.directory(step))
            await self._announce(step)
        if self._is_leading:
            await self._store.runs.end_lost_versions()
        await self._admit()
        if self._is_leading:
            await self._store.runs.set_status("training")
        try:
            await self._evaluations.run_if_due(step)
            return await self._finish(await self._run_steps())
        finally:
            await self._evaluations.cancel()
            await self._saver.cancel()

    async def _note_lost_versions(self, step: int) -> None:
        lost = await self._store.runs.note_lost_versions(step)
        if lost is not None:
            logger.warning(
                "the run resumes after step %d, and checkpoints of later steps are lost: versions "
                "%d to %d get new weights; records of the lost ones count as steps away from "
                "version %d, and those beyond --max_staleness are dropped",
                *(step, step + 1, lost.last, step),
            )

    async def _run_steps(self) -> str:
        """Run steps until max_steps, the end of the data, or a signal; return the run's status."""
        while not self._stop.is_set() and self._history.last_step < self._trainer.max_steps:
            end = await self._step(self._history.last_step + 1)
            if end != "full" and not self._stop.is_set():
                return "no_signal" if await self._has_no_signal() else end
        return "stopped" if self._stop.is_set() else "completed"

    async def _has_no_signal(self) -> bool:
        """Return whether hardly any group could be trained on: less than a step, and a tenth of all."""
        signal = await self._store.reports.signal(self._consumer)
        full = self._control.groups_per_step
        return signal.num_kept < min(full, MIN_KEPT_SHARE * signal.num_groups)

    async def _step(self, step: int) -> str:
        """Run one optimizer step; return `full`, or why the data ended early."""
        seconds: dict[str, float] = {}
        timed = self._history.timed
        self._phase.enter("sampling")
        with timed("wait_samples", seconds):
            await self._read_control()
            step_groups = await self._reader.read_step(
                step,
                groups_consumed=self._history.groups_consumed,
                control=lambda: self._control,
                stop=self._stop,
            )
        # Records reserved for an abandoned step are released by the next recovery.
        if step_groups.end == "stopped" or not step_groups.usable:
            if step_groups.end == "data_ended":
                self._history.groups_consumed += step_groups.num_new_groups
                self._history.add_tail(step_groups.dropped)
            return step_groups.end
        self._phase.enter("training")
        with timed("prepare", seconds):
            batch = await asyncio.to_thread(self._build_batch, step_groups, self._trainer.merge)
        if self._device is not None:
            with timed("acquire_device", seconds):
                await self._device.acquire()
        merge_error = None
        if self._trainer.verify_merge and step % self._trainer.verify_merge == 0:
            with timed("verify", seconds):
                merge_error = await self._merge_error(step_groups, batch)
        outcome = await self._group.train(batch.micro_batches)
        for phase, spent in outcome.seconds.items():
            self._history.add_seconds(phase, spent, seconds)
        self._history.groups_consumed += step_groups.num_new_groups
        metrics = step_metrics(
            step_groups,
            batch.stats,
            outcome,
            num_ranks=self._group.num_ranks,
            seconds=seconds,
            merge_error=merge_error,
        )
        # Reports do not delay the new version; they are written while it is published.
        trainings = turn_trainings(self._consumer, step_groups, batch, outcome)
        async with run_concurrently(self._store.ledger.put_turn_trainings(trainings)):
            await self._publish(metrics, outcome, end=step_groups.end)
        return step_groups.end

    def _build_batch(self, step_groups: StepGroups, merge: Merge) -> StepBatch:
        """Merge, weight and pack the groups of a step according to the algorithm's flags."""
        return build_training_step(
            step_groups.groups,
            self._algorithm,
            policy_version=step_groups.step - 1,
            token_budget=self._trainer.max_tokens,
            merge=merge,
            num_ranks=self._group.dp_size,
            attention_cost=self._group.attention_cost,
        )

    async def _merge_error(self, step_groups: StepGroups, batch: StepBatch) -> float | None:
        """Return the relative error of the merged gradient against that of separate turns.

        Returns:
            The error; None if neither loss is finite, in which case the step will be skipped.

        Raises:
            TrainingError: the error exceeds the tolerance; the step is not applied.
        """
        separate = await asyncio.to_thread(self._build_batch, step_groups, "none")
        check = await self._group.check_merge(batch.micro_batches, separate.micro_batches)
        if not (math.isfinite(check.loss_merged) or math.isfinite(check.loss_separate)):
            return None
        if not check.is_equal:
            path = write_merge_report(self._session.output_path, step_groups.step, check)
            raise TrainingError(
                f"step {step_groups.step}: the gradient of merged turns differs from that of separate "
                f"turns by {check.relative_error:.3g} (tolerance {check.tolerance:g}); see {path}"
            )
        return check.relative_error

    async def _publish(self, metrics: StepMetrics, outcome: StepOutcome, *, end: str) -> None:
        """Write, commit and publish the weights of a step, and report its metrics."""
        step, seconds, timed = metrics.step, metrics.seconds, self._history.timed
        self._phase.enter("publishing")
        check_finite(self._history, step, outcome, self._session.output_path)
        directory = self._publisher.directory(step)
        is_last = step == self._trainer.max_steps or end != "full" or self._stop.is_set()
        self._history.steps.append(metrics)
        saves_checkpoint = is_last or step % self._trainer.save_steps == 0
        exports_first = saves_checkpoint or self._publisher.needs_files
        if exports_first:
            with timed("publish", seconds):
                await self._group.export(directory)
        if saves_checkpoint:
            # Checkpoint and ledger commit come before the announcement: a crash in between must not
            # take back a version that servers already serve.
            with timed("checkpoint", seconds):
                await self._saver.save(directory, self._history)
        if self._device is not None:
            with timed("offload_device", seconds):
                await self._device.offload()
        with timed("publish", seconds):
            await self._announce(step, None if exports_first else self._group.export)
            await self._admit()
        metrics = metrics.model_copy(update={"seconds": seconds, "time": time.time()})
        self._history.steps[-1] = metrics
        self._session.report(metrics)
        await call_after_step(self._trainer.on_step, metrics)
        figures = metrics.model_dump(mode="json", exclude_none=True)
        await self._store.figures.put_step(self._consumer, figures)
        if step % self._trainer.logging_steps == 0:
            log_step(metrics, self._trainer.max_steps)
        await self._evaluations.run_if_due(step)

    async def _announce(self, step: int, write: WriteFiles | None = None) -> None:
        """Publish a version; sleeping servers of a colocated run wake with it."""
        report = await self._publisher.announce(step, write)
        if self._device is not None:
            await self._device.release()
        logger.info(
            "version %d published: %d server(s) updated, %d failed",
            report.version,
            len(report.updated),
            len(report.failed),
        )

    async def _finish(self, status: str) -> TrainResult:
        """Write the last checkpoint if it is missing, evaluate, and write the reports."""
        history, output_path = self._history, self._session.output_path
        step, run_name = history.last_step, self._session.run.run_name
        with history.timed("checkpoint"):
            await self._saver.settle()
            await self._publisher.settle()
            if self._saver.saved_step < step:
                await self._saver.save(self._publisher.directory(step), history)
                await self._saver.settle()
        await self._evaluations.finish()
        if status != "stopped" and not await self._evaluations.run_last(step):
            status = "stopped"  # the same command then resumes with the evaluation
        if status == "stopped":
            await self._store.ledger.recover(self._consumer, step)
        history.add_seconds("total", time.monotonic() - self._started)
        summary = summarize(history, run_name=run_name, status=status)
        missing = await self._store.reports.missing_scores()
        summary["records"]["unscorable"] = missing.num_unscorable
        if status == "no_signal":
            signal = await self._store.reports.signal(self._consumer)
            summary["no_signal"] = signal.model_dump(mode="json")
            logger.warning("there was nothing to learn from: %s", signal)
        summary_path = write_summary(output_path, summary)
        picture_path = draw_rewards(output_path, history, run_name=run_name)
        if status != "stopped" and self._is_leading:
            final_status: RunStatus = "no_signal" if status == "no_signal" else "completed"
            await self._store.runs.set_status(final_status)
        return TrainResult(
            status=status,
            step=step,
            output_path=output_path,
            summary_path=summary_path,
            picture_path=picture_path,
        )

    async def _admit(self) -> None:
        await self._read_control()
        await self._reader.admit(
            self._history.groups_consumed, self._history.last_step + 1, self._control
        )

    async def _read_control(self) -> None:
        """Read size and freshness of steps; users may edit the `runs` document at any time."""
        run = await self._store.runs.get()
        if run is not None:
            self._control = run.control
            self._reader.lost_versions = run.lost_versions

    async def _follow_control(self) -> None:
        """Apply edits of the controls until cancelled, including during a step."""
        while True:
            await asyncio.sleep(_CONTROL_SECONDS)
            try:
                if await self._store.runs.audit_control():
                    logger.info("the run's controls were edited in the database")
                await self._read_control()
                await self._reader.apply_control(self._control)
            except StoreError as error:
                logger.warning(
                    "cannot read the run's controls, keeping the current ones: %s", error
                )


@asynccontextmanager
async def run_concurrently(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` during the block; leaving the block waits for it and raises its error."""
    task = asyncio.create_task(work)
    try:
        yield
    except BaseException:
        task.cancel()
        await asyncio.wait({task})
        raise
    await task

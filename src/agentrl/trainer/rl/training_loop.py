"""The trainer's loop on rank 0.

    read groups ──reserve──> optimizer step ──> weights written ──(every save_steps)──> checkpoint
         ^                                                                                  │
         └── admission <── servers updated <── version announced <──────── ledger committed ┘

A crash at any point goes back to the last checkpoint: what was reserved past it is ready again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.checks import groups_per_step
from agentrl.config.sections import RootConfig
from agentrl.data import StepBatch
from agentrl.data.tree import Merge
from agentrl.errors import StoreError, TrainingError
from agentrl.inference.weight_sync import PolicyFiles, PolicyPublisher, PublishReport, WriteFiles
from agentrl.rollout.evaluation.eval_scores import EvalMetrics
from agentrl.rollout.evaluation.held_out import evaluate
from agentrl.schema import Task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.checkpoint.saver import Saver
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.measures import check_finite, step_metrics
from agentrl.trainer.metrics.reporting import (
    append_metrics,
    draw_rewards,
    summarize,
    write_merge_report,
    write_summary,
)
from agentrl.trainer.metrics.trackers import Trackers
from agentrl.trainer.rl.batches import step_batch
from agentrl.trainer.rl.colocation import SharedDevice
from agentrl.trainer.rl.step_groups import GroupReader, StepControl, StepGroups
from agentrl.trainer.rl.step_lineage import beside, turn_trainings
from agentrl.trainer.worker_group import Team

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 1.0


@dataclass(frozen=True)
class TrainResult:
    """How a run of the trainer ended."""

    status: str
    """`completed` (max_steps done), `data_ended` or `stopped` (by a signal)."""
    step: int
    """Optimizer steps done, resumed ones included."""
    output_path: Path
    summary_path: Path
    picture_path: Path


class TrainLoop:
    """Drives the store, the ranks and the servers through the optimizer steps."""

    def __init__(
        self,
        config: RootConfig,
        *,
        store: TrajectoryStore,
        team: Team,
        publisher: PolicyPublisher | PolicyFiles,
        history: History,
        trackers: Trackers,
        eval_tasks: Sequence[Task],
        stop: asyncio.Event,
    ) -> None:
        self._run = config.run
        self._algorithm = config.algorithm
        self._trainer = config.trainer
        self._store = store
        self._team = team
        self._publisher = publisher
        self._device = SharedDevice.of(config, store, publisher, team)
        self._history = history
        self._trackers = trackers
        self._eval_tasks = eval_tasks
        self._control = StepControl(
            groups_per_step(config, team.num_shares), config.algorithm.max_staleness
        )
        self._stop = stop
        self._leads = config.trainer.consumer == DEFAULT_CONSUMER
        """Any other trainer reads along: the run's state is not its to change."""
        self._evaluating: dict[int, asyncio.Task[EvalMetrics | None]] = {}
        self._first_step = history.last_step
        self._saver = Saver(
            config.run.output_path,
            team=team,
            trainer=config.trainer,
            saved_step=history.last_step,
            on_saved=self._commit,
        )
        self._entered = time.monotonic()
        self._reader = GroupReader(
            store,
            consumer=config.trainer.consumer,
            algorithm=config.algorithm,
            seed=config.run.seed,
            max_steps=config.trainer.max_steps,
            more_may_come=config.rollout.enable_sampling,
            scorer=config.trainer.trained_scorer,
        )

    async def run(self) -> TrainResult:
        """Train to the end, to the end of the data, or until asked to stop.

        Raises:
            TrainingError: losses or gradients stay non-finite.
            StoreError: the store failed, or an evaluation did not finish in time.
        """
        obeying = asyncio.create_task(self._obey_control())
        try:
            return await self._train()
        finally:
            obeying.cancel()
            await asyncio.wait([obeying])

    async def _train(self) -> TrainResult:
        step = self._history.last_step
        await self._store.ledger.recover(self._trainer.consumer, step)
        with self._phase("publish"):
            await self._team.export(self._publisher.directory(step))
            self._log_publish(await self._announce(step))
        await self._admit()
        if self._leads:
            await self._store.runs.set_status("training")
        try:
            await self._evaluate_if_due(step)
            return await self._finish(await self._all_steps())
        finally:
            await self._give_up_evaluations()
            await self._saver.give_up()

    async def _all_steps(self) -> str:
        """Make steps while there is data for them; return how it ended."""
        while not self._stop.is_set() and self._history.last_step < self._trainer.max_steps:
            end = await self._step(self._history.last_step + 1)
            if end != "full" and not self._stop.is_set():
                return end
        return "stopped" if self._stop.is_set() else "completed"

    async def _step(self, step: int) -> str:
        """Make one optimizer step; return `full`, or why the data ended before."""
        seconds: dict[str, float] = {}
        with self._phase("wait_samples", seconds):
            await self._read_control()
            found = await self._reader.read_step(
                step,
                groups_consumed=self._history.groups_consumed,
                control=lambda: self._control,
                stop=self._stop,
            )
        # What was reserved for a step that is not made is given back by the next recovery.
        if found.end == "stopped" or not found.usable:
            if found.end == "data_ended":
                self._history.groups_consumed += found.num_new_groups
                self._history.add_tail(found.dropped)
            return found.end
        with self._phase("prepare", seconds):
            batch = await asyncio.to_thread(self._build, found, self._trainer.merge)
        if self._device is not None:
            with self._phase("take_device", seconds):
                await self._device.take()
        merge_error = None
        if self._trainer.verify_merge and step % self._trainer.verify_merge == 0:
            with self._phase("verify", seconds):
                merge_error = await self._verified(step, found, batch)
        outcome = await self._team.train(batch.micro_batches)
        for phase, spent in outcome.seconds.items():
            self._account(phase, spent, seconds)
        self._history.groups_consumed += found.num_new_groups
        metrics = self._metrics(step, found, batch, outcome, seconds).model_copy(
            update={"merge_error": merge_error}
        )
        made = turn_trainings(self._trainer.consumer, found, batch, outcome)
        async with beside(self._store.ledger.put_turn_trainings(made)):
            await self._hand_out(metrics, outcome, end=found.end)
        return found.end

    async def _verified(self, step: int, found: StepGroups, batch: StepBatch) -> float | None:
        """Return the relative error of the step's gradient against separate turns.

        None where neither way gives a finite loss: the step is going to be skipped for that.

        Raises:
            TrainingError: it is beyond the tolerance; nothing of the step is kept.
        """
        separate = await asyncio.to_thread(self._build, found, "none")
        check = await self._team.check_merge(batch.micro_batches, separate.micro_batches)
        if not (math.isfinite(check.loss_merged) or math.isfinite(check.loss_separate)):
            return None
        if not check.is_equal:
            path = write_merge_report(self._run.output_path, step, check)
            raise TrainingError(
                f"step {step}: the gradient of merged turns differs from that of separate turns "
                f"by {check.relative_error:.3g} (tolerance {check.tolerance:g}); see {path}"
            )
        return check.relative_error

    async def _hand_out(self, metrics: StepMetrics, outcome: StepOutcome, *, end: str) -> None:
        """Write, commit and publish the weights of a step, and note what it did."""
        step, seconds = metrics.step, metrics.seconds
        check_finite(self._history, step, outcome, self._run.output_path)
        directory = self._publisher.directory(step)
        is_last = step == self._trainer.max_steps or end != "full" or self._stop.is_set()
        self._history.steps.append(metrics)
        saves = is_last or step % self._trainer.save_steps == 0
        writes_first = saves or self._publisher.needs_files
        if writes_first:
            with self._phase("publish", seconds):
                await self._team.export(directory)
        if saves:
            with self._phase("checkpoint", seconds):
                await self._saver.save(directory, self._history)
        if self._device is not None:
            with self._phase("leave_device", seconds):
                await self._device.leave()
        with self._phase("publish", seconds):
            report = await self._announce(step, None if writes_first else self._team.export)
            await self._admit()
        self._history.steps[-1] = metrics.model_copy(
            update={"seconds": seconds, "time": time.time()}
        )
        append_metrics(self._run.output_path, self._history.steps[-1])
        self._trackers.log(self._history.steps[-1].model_dump(exclude_none=True), step)
        self._log_publish(report)
        self._log_step(self._history.steps[-1])
        await self._evaluate_if_due(step)

    async def _announce(self, step: int, write: WriteFiles | None = None) -> PublishReport:
        """Publish a version. Servers that gave the trainer their device wake up on it."""
        report = await self._publisher.announce(step, write)
        if self._device is not None:
            await self._device.hand_back()
        return report

    async def _finish(self, status: str) -> TrainResult:
        """Save what is not saved yet, evaluate, and leave the reports."""
        step = self._history.last_step
        with self._phase("checkpoint"):
            await self._saver.settle()
            await self._publisher.settle()
            if self._saver.saved_step < step:
                await self._saver.save(self._publisher.directory(step), self._history)
                await self._saver.settle()
        with self._phase("eval"):
            await self._collect_evaluations(wait=True)
        if status == "stopped":
            await self._store.ledger.recover(self._trainer.consumer, step)
        elif self._trainer.eval_strategy != "no":
            await self._evaluate(step)
        self._history.add_seconds("total", time.monotonic() - self._entered)
        summary_path, picture_path = self._report(status)
        if status != "stopped" and self._leads:
            await self._store.runs.set_status("completed")
        return TrainResult(
            status=status,
            step=step,
            output_path=self._run.output_path,
            summary_path=summary_path,
            picture_path=picture_path,
        )

    async def _commit(self, step: int) -> None:
        """Commit the ledger up to a checkpoint."""
        await self._store.ledger.commit(self._trainer.consumer, step)

    def _is_eval_due(self, step: int) -> bool:
        strategy = self._trainer.eval_strategy
        if strategy == "steps":
            return step % self._trainer.eval_steps == 0
        return strategy == "ends" and step == 0

    async def _evaluate_if_due(self, step: int) -> None:
        """Evaluate a version: beside training with `steps`, before it goes on otherwise."""
        await self._collect_evaluations(wait=False)
        if not self._is_eval_due(step):
            return
        if self._trainer.eval_strategy != "steps":
            await self._evaluate(step)
        elif self._is_new(step):
            logger.info("evaluating version %d beside training", step)
            self._evaluating[step] = asyncio.create_task(self._evaluation(step))

    async def _evaluate(self, version: int) -> None:
        if not self._is_new(version):
            return
        logger.info("evaluating version %d on %d questions", version, len(self._eval_tasks))
        with self._phase("eval"):
            self._note(await self._evaluation(version))

    def _is_new(self, version: int) -> bool:
        return bool(self._eval_tasks) and self._history.eval_at(version) is None

    async def _evaluation(self, version: int) -> EvalMetrics | None:
        return await evaluate(
            self._store,
            self._eval_tasks,
            version=version,
            reuse=version == self._first_step,
            timeout_seconds=self._trainer.eval_timeout_seconds,
            stop=self._stop,
        )

    async def _collect_evaluations(self, *, wait: bool) -> None:
        """Note the results of evaluations beside training that have ended (or wait for them)."""
        for version, job in sorted(self._evaluating.items()):
            if wait or job.done():
                self._note(await job)
                del self._evaluating[version]

    async def _give_up_evaluations(self) -> None:
        for job in self._evaluating.values():
            job.cancel()
        await asyncio.gather(*self._evaluating.values(), return_exceptions=True)

    def _note(self, found: EvalMetrics | None) -> None:
        if found is not None:
            self._history.add_eval(found)
            self._trackers.log({"eval": found.figures()}, found.version)
            self._log_eval(found)

    async def _admit(self) -> None:
        await self._read_control()
        await self._reader.admit(
            self._history.groups_consumed, self._history.last_step + 1, self._control
        )

    async def _read_control(self) -> None:
        """Take over what steers the steps; it may be edited in the `runs` document at any time."""
        run = await self._store.runs.get()
        if run is not None:
            self._control = StepControl(run.control.groups_per_step, run.control.max_staleness)

    async def _obey_control(self) -> None:
        """Follow changes of the controls until cancelled, also in the middle of a step."""
        while True:
            await asyncio.sleep(_CONTROL_SECONDS)
            try:
                if await self._store.runs.audit_control():
                    logger.info("the run's controls were edited in the database")
                await self._read_control()
                await self._reader.obey(self._control)
            except StoreError as error:
                logger.warning("the controls are left as they are: %s", error)

    def _build(self, found: StepGroups, merge: Merge) -> StepBatch:
        return step_batch(
            found.groups,
            self._algorithm,
            policy_version=found.step - 1,
            token_budget=self._trainer.max_tokens,
            merge=merge,
            num_ranks=self._team.num_shares,
            pair_cost=self._team.pair_cost,
        )

    def _metrics(
        self,
        step: int,
        found: StepGroups,
        batch: StepBatch,
        outcome: StepOutcome,
        seconds: dict[str, float],
    ) -> StepMetrics:
        return step_metrics(
            step,
            found,
            batch.stats,
            outcome,
            seconds,
            num_ranks=self._team.num_ranks,
        )

    def _report(self, status: str) -> tuple[Path, Path]:
        summary = summarize(self._history, run_name=self._run.run_name, status=status)
        summary_path = write_summary(self._run.output_path, summary)
        picture_path = draw_rewards(
            self._run.output_path, self._history, run_name=self._run.run_name
        )
        return summary_path, picture_path

    @contextmanager
    def _phase(self, name: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._account(name, time.monotonic() - started, seconds)

    def _account(self, phase: str, spent: float, seconds: dict[str, float] | None = None) -> None:
        self._history.add_seconds(phase, spent)
        if seconds is not None:
            seconds[phase] = round(seconds.get(phase, 0.0) + spent, 4)

    def _log_step(self, metrics: StepMetrics) -> None:
        if metrics.step % self._trainer.logging_steps:
            return
        behind = metrics.staleness
        num_behind = sum(behind.values())
        logger.info(
            "step %d/%d reward %s loss %s grad %s lr %.2e entropy %s staleness %.2f "
            "groups %d dropped %s seconds %s",
            metrics.step,
            self._trainer.max_steps,
            _short(metrics.reward_mean),
            _short(metrics.loss),
            _short(metrics.grad_norm),
            metrics.learning_rate,
            _short(metrics.entropy),
            sum(key * count for key, count in behind.items()) / num_behind if num_behind else 0.0,
            metrics.num_groups,
            metrics.dropped or "none",
            {phase: round(spent, 2) for phase, spent in metrics.seconds.items()},
        )

    @staticmethod
    def _log_publish(report: PublishReport) -> None:
        logger.info(
            "version %d published: %d server(s) updated, %d failed",
            report.version,
            len(report.updated),
            len(report.failed),
        )

    @staticmethod
    def _log_eval(found: EvalMetrics) -> None:
        logger.info("evaluation of version %d: %s", found.version, found.one_line())


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"

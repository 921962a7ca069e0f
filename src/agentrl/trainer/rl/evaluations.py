"""Questions that a run asks without training on the answers: its evaluations, and those of a loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentrl.config.sections import DataSection
from agentrl.datasets.question import question_of
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import ConfigError, StoreError
from agentrl.evaluation.eval_scores import EvalMetrics
from agentrl.evaluation.held_out import evaluate
from agentrl.schema import TERMINAL_STATUSES, Record, Task
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.run_start import TrainingSession
from agentrl.trainer.rl.run_upkeep import PhaseReporter

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_ASKED = "asked"
"""Tag of a loop's questions."""
_BEFORE_EVALUATIONS = -(10**6)
"""Order of a loop's questions."""


class Evaluations:
    """Evaluations of one run: concurrent with training (`steps`), or at its ends (`ends`)."""

    def __init__(
        self,
        session: TrainingSession,
        store: TrajectoryStore,
        tasks: Sequence[Task],
        phase: PhaseReporter,
        number: Callable[[int], int],
    ) -> None:
        """Continue after the steps done so far.

        Args:
            session: history and trackers receive the scores.
            store: the run's store; samplers find the questions there.
            tasks: held-out questions; if empty, nothing is evaluated.
            phase: reports that training waits for an evaluation.
            number: returns the version of the weights after a step.
        """
        self._trainer = session.trainer
        self._history = session.history
        self._trackers = session.trackers
        self._store = store
        self._tasks = tasks
        self._phase = phase
        self._number = number
        self._stop = session.stop
        self._first_step = session.history.last_step
        self._running: dict[int, asyncio.Task[EvalMetrics | None]] = {}

    async def restore(self) -> None:
        """Restore the records after the checkpoint from which the run resumes."""
        for figures in await self._store.figures.evaluations(self._trainer.consumer):
            metrics = EvalMetrics.model_validate(figures)
            if self._history.eval_at(metrics.version) is None:
                self._history.add_eval(metrics)

    async def run_if_due(self, step: int) -> None:
        """Record finished evaluations, and evaluate the version of a step if it is due."""
        await self._collect(wait=False)
        strategy = self._trainer.eval_strategy
        if strategy == "steps":
            if step % self._trainer.eval_steps == 0 and self._is_new(step):
                logger.info("evaluating version %d during training", self._number(step))
                self._running[step] = asyncio.create_task(self._evaluate(step))
        elif strategy == "ends" and step == 0:
            await self._evaluate_now(step)

    async def now(self, step: int) -> EvalMetrics | None:
        """Evaluate the version of a step, and return its scores; None if a signal came first."""
        if not self._tasks:
            raise ConfigError(
                "evaluate: there are no questions; give --eval_file, and --eval_strategy ends or steps"
            )
        await self._evaluate_now(step)
        return self._history.eval_at(step)

    async def finish(self) -> None:
        """Wait for the evaluations that run during training."""
        if self._running:
            self._phase.enter("evaluating")
        with self._history.timed("eval"):
            await self._collect(wait=True)

    async def run_last(self, step: int) -> bool:
        """Evaluate the last version if configured; return False if a signal came first."""
        if self._trainer.eval_strategy != "no":
            await self._evaluate_now(step)
        return not self._is_new(step)

    async def cancel(self) -> None:
        """Cancel the evaluations that run during training."""
        for job in self._running.values():
            job.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _collect(self, *, wait: bool) -> None:
        for step, job in sorted(self._running.items()):
            if wait or job.done():
                await self._record(await job)
                del self._running[step]

    async def _evaluate_now(self, step: int) -> None:
        if not self._is_new(step):
            return
        logger.info("evaluating version %d on %d questions", self._number(step), len(self._tasks))
        self._phase.enter("evaluating")
        with self._history.timed("eval"):
            await self._record(await self._evaluate(step))

    def _is_new(self, step: int) -> bool:
        return bool(self._tasks) and self._history.eval_at(step) is None

    async def _evaluate(self, step: int) -> EvalMetrics | None:
        return await evaluate(
            self._store,
            self._tasks,
            step=step,
            version=self._number(step),
            # Only the resumed version can have tasks from an earlier process that were sampled with
            # the same weights.
            reuse=step == self._first_step,
            timeout_seconds=self._trainer.eval_timeout_seconds,
            stop=self._stop,
        )

    async def _record(self, metrics: EvalMetrics | None) -> None:
        if metrics is not None:
            self._history.add_eval(metrics)
            self._trackers.log({"eval": metrics.figures()}, metrics.version)
            figures = metrics.model_dump(mode="json", exclude_none=True)
            await self._store.figures.put_evaluation(self._trainer.consumer, figures)
            logger.info(
                "evaluation of version %d: %s", self._number(metrics.version), metrics.one_line()
            )


async def ask(
    store: TrajectoryStore,
    row: Mapping[str, Any],
    data: DataSection,
    *,
    num_samples: int,
    timeout_seconds: float,
) -> list[Record]:
    """Let the samplers answer a question before all others, and return the finished records."""
    entry = {**row, "id": f"{_ASKED}-{uuid4().hex[:12]}"}
    question = question_of(entry, data, "the question", Path.cwd())
    (task,) = tasks_from_questions(
        [question], "eval", num_generations=num_samples, first_order=_BEFORE_EVALUATIONS, tag=_ASKED
    )
    await store.tasks.add([task])
    deadline = time.monotonic() + timeout_seconds
    while True:
        records = await store.records.of_task(task.id)
        if records and all(record.status in TERMINAL_STATUSES for record in records):
            return records
        if time.monotonic() > deadline:
            raise StoreError(
                f"{task.id}: the conversations did not finish within {timeout_seconds:g} s; are "
                "samplers and servers up?"
            )
        await asyncio.sleep(_POLL_SECONDS)

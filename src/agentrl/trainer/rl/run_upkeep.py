"""What happens beside the loop over a run's steps: its phase, the end of old turns, and its own end."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.errors import StoreError
from agentrl.schema import RunPhase, RunStatus
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.checkpoint import checkpoint_paths
from agentrl.trainer.metrics.reporting import draw_rewards, summarize, write_summary
from agentrl.trainer.rl.run_start import TrainingSession

logger = logging.getLogger(__name__)

MIN_KEPT_SHARE = 0.1
"""Share of the groups that has to be trained on for a run to count as one that learned."""
_CHECK_SECONDS = 10.0
_REST_SHARE = 4.0
"""Rest after a batch of old turns, in units of the time that the batch took: the run's own queries
are not delayed."""


class PhaseReporter:
    """Writes the phases of a run without blocking the trainer; very short ones may be skipped."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._phase: RunPhase = "loading"
        self._is_new = asyncio.Event()

    def enter(self, phase: RunPhase) -> None:
        """Set the phase that the trainer enters."""
        self._phase = phase
        self._is_new.set()

    async def report(self) -> None:
        """Write every phase that is entered, until cancelled."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            try:
                await self._store.runs.set_phase(self._phase)
            except StoreError as error:
                logger.warning("cannot record that the run is %s: %s", self._phase, error)


async def retain(store: TrajectoryStore, config: RootConfig) -> None:
    """Remove the turns of old steps until cancelled; return at once without `--retain_steps`."""
    if config.trainer.consumer != DEFAULT_CONSUMER or config.store.retain_steps is None:
        return
    while True:
        try:
            await expire_due(store, config)
        except StoreError as error:
            logger.warning("old turns are kept for now: %s", error)
        await asyncio.sleep(_CHECK_SECONDS)


async def expire_due(
    store: TrajectoryStore, config: RootConfig, *, rest_share: float = _REST_SHARE
) -> int:
    """Remove the turns of all steps that may expire now; return their number."""
    retention = store.retention
    num_turns = 0
    for step in range(
        await retention.expired_step() + 1, await _last_expiring_step(store, config) + 1
    ):
        expiring = await retention.of_step(step)
        if expiring.waits_for:
            logger.info(
                "the turns of step %d stay until trainer %r has consumed its groups",
                *(step, expiring.waits_for),
            )
            break
        for batch in expiring.batches:
            started = time.monotonic()
            num_turns += await retention.expire(batch)
            await asyncio.sleep(rest_share * (time.monotonic() - started))
        await retention.finish_step(step)
    if num_turns:
        logger.info("removed %d turns of steps up to %d", num_turns, await retention.expired_step())
    return num_turns


async def _last_expiring_step(store: TrajectoryStore, config: RootConfig) -> int:
    """Return the last step that neither a checkpoint, a replay nor another training needs.

    A step that the oldest checkpoint on disk does not contain is trained again if the run resumes
    from it.
    """
    saved = [int(path.name) for path in checkpoint_paths(config.run.output_path)]
    run = await store.runs.get()
    if not saved or run is None:
        return 0
    bounds = [min(saved)]
    if config.store.retain_steps is not None:
        bounds.append(max(saved) - config.store.retain_steps)
    return min(bounds)


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


async def has_no_signal(store: TrajectoryStore, consumer: str, groups_per_step: int) -> bool:
    """Return whether hardly any group could be trained on: less than a step, and a tenth of all."""
    signal = await store.reports.signal(consumer)
    return signal.num_kept < min(groups_per_step, MIN_KEPT_SHARE * signal.num_groups)


async def report_end(session: TrainingSession, store: TrajectoryStore, status: str) -> TrainResult:
    """Write summary and picture, and set the run's status unless a signal stopped it."""
    history, output_path = session.history, session.output_path
    run_name, consumer = session.run.run_name, session.trainer.consumer
    summary = summarize(history, run_name=run_name, status=status)
    missing = await store.reports.missing_scores()
    summary["records"]["unscorable"] = missing.num_unscorable
    if status == "no_signal":
        signal = await store.reports.signal(consumer)
        summary["no_signal"] = signal.model_dump(mode="json")
        logger.warning("there was nothing to learn from: %s", signal)
    summary_path = write_summary(output_path, summary)
    picture_path = draw_rewards(output_path, history, run_name=run_name)
    if status != "stopped" and consumer == DEFAULT_CONSUMER:
        final_status: RunStatus = "no_signal" if status == "no_signal" else "completed"
        await store.runs.set_status(final_status)
    return TrainResult(
        status=status,
        step=history.last_step,
        output_path=output_path,
        summary_path=summary_path,
        picture_path=picture_path,
    )

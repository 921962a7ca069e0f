"""The end of a training run: its status, its summary and its picture."""

import logging
from dataclasses import dataclass
from pathlib import Path

from agentrl.schema import RunStatus
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.metrics.reporting import draw_rewards, summarize, write_summary
from agentrl.trainer.training_session import TrainingSession

logger = logging.getLogger(__name__)

MIN_KEPT_SHARE = 0.1
"""Share of the groups that has to be trained on for a run to count as one that learned."""


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

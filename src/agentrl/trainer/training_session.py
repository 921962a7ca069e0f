"""What a training loop works with: the start weights, the learners, the run's history and trackers.

Shared by reinforcement learning and supervised fine-tuning.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.optimizer_arguments import parse_optim_args
from agentrl.config.sections import ModelSection, RootConfig, RunSection, TrainerSection
from agentrl.distributed import MeshShape, Ranks
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.adapter_files import (
    CONFIG_FILE,
    AdapterShape,
    is_adapter,
    read_shape,
)
from agentrl.models.checkpoints.architectures import (
    check_can_be_computed,
    check_parallel_support,
    raw_config,
)
from agentrl.models.checkpoints.resolve import (
    check_adapter_targets,
    check_router_replay,
    resolve_model,
)
from agentrl.models.load import read_config
from agentrl.models.stage_layers import check_stages
from agentrl.runtime.telemetry.prometheus import metrics_endpoint
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.trainer.bootstrap import WorkerGroup, learners
from agentrl.trainer.checkpoint import Checkpoint
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights, adapter_shape
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.metrics_file import append_metrics, rewind_metrics
from agentrl.trainer.metrics.trackers import Trackers, open_trackers
from agentrl.trainer.metrics.trainer_metrics import trainer_metrics


@dataclass(frozen=True)
class TrainingSession:
    """The resources that both training loops use."""

    run: RunSection
    trainer: TrainerSection
    group: WorkerGroup
    history: History
    trackers: Trackers
    stop: asyncio.Event
    """Once it is set, the run ends after the current step, with a checkpoint."""

    @property
    def output_path(self) -> Path:
        """Directory of the run's output."""
        return self.run.output_path

    def report(self, metrics: StepMetrics) -> None:
        """Write the figures of a step to metrics.jsonl and to the trackers."""
        append_metrics(self.output_path, metrics)
        self.trackers.log(metrics.model_dump(exclude_none=True), metrics.step)


@asynccontextmanager
async def training_session(
    config: RootConfig,
    ranks: Ranks,
    settings: LearnerSettings,
    checkpoint: Checkpoint | None,
    *,
    state_path: Path | None,
    stop: asyncio.Event,
    kind: Literal["rl", "sft"] = "rl",
) -> AsyncIterator[TrainingSession]:
    """Load the model on all ranks and open the run's history, trackers and metrics endpoint.

    Args:
        config: the resolved configuration.
        ranks: this process, rank 0.
        settings: settings of every rank's learner.
        checkpoint: the checkpoint to resume, if there is one.
        state_path: its optimizer state, see `state_to_resume`.
        stop: see `TrainingSession`.
        kind: kind of the run, stored in a new history.
    """
    async with learners(ranks, settings, state_path) as group:
        history = checkpoint.history if checkpoint else History(kind=kind)
        rewind_metrics(config.run.output_path, history)
        with ExitStack() as stack:
            trackers = open_trackers(config)
            stack.callback(trackers.finish)
            stack.enter_context(metrics_endpoint(config.run, lambda: trainer_metrics(history)))
            yield TrainingSession(config.run, settings.trainer, group, history, trackers, stop)


def state_to_resume(checkpoint: Checkpoint | None, max_steps: int) -> Path | None:
    """Return the directory of the optimizer state to load, or None if no step needs it."""
    if checkpoint is None or checkpoint.step >= max_steps:
        return None
    return checkpoint.state_path


def check_trainer_flags(trainer: TrainerSection) -> None:
    """Check the optimizer arguments, and that the trackers are installed."""
    parse_optim_args(trainer.optim_args)
    check_trackers(trainer.report_to)


def start_weights(
    model: ModelSection, checkpoint: Checkpoint | None, shape: MeshShape
) -> StartWeights:
    """Return the weights to start from: the newest checkpoint's, else those of the given model.

    Args:
        model: the model, and the adapter if one is trained.
        checkpoint: the newest checkpoint, if there is one.
        shape: the mesh, which must divide the model.
    """
    weights = _find_weights(model, checkpoint)
    path = weights.model_path
    if model.router_replay:
        check_router_replay(path)
    if model.lora_rank:
        check_adapter_targets(path, model.lora_target_modules)
    trusted = model.trust_remote_code
    check_can_be_computed(path, raw_config(path), trust_remote_code=trusted)
    config = read_config(path, trust_remote_code=trusted)
    check_parallel_support(config, shape)
    check_stages(config, shape.pp)
    return weights


def _find_weights(model: ModelSection, checkpoint: Checkpoint | None) -> StartWeights:
    if checkpoint is None:
        return StartWeights(resolve_model(model.model_name_or_path))
    path, adapter = checkpoint.model_path, adapter_shape(model)
    if adapter is None:
        if is_adapter(path):
            raise ConfigError(
                f"{checkpoint.path} holds an adapter; resume it with --lora_rank "
                f"{read_shape(path).rank}, or use another --run_name"
            )
        return StartWeights(path)
    if not is_adapter(path):
        raise ConfigError(
            f"{checkpoint.path} holds the full weights of a run without an adapter; resume it without "
            f"--lora_rank, or use another --run_name with --model_name_or_path {path}"
        )
    _check_same_adapter(adapter, read_shape(path), path)
    return StartWeights(resolve_model(model.model_name_or_path), path)


def _check_same_adapter(expected: AdapterShape, stored: AdapterShape, path: Path) -> None:
    if (expected.rank, expected.alpha) != (stored.rank, stored.alpha):
        raise ConfigError(
            f"{path} is an adapter of --lora_rank {stored.rank} --lora_alpha {stored.alpha}; resume "
            "with these, or use another --run_name"
        )
    if expected.base != stored.base:
        raise ConfigError(
            f"{path} is an adapter of {stored.base}; pass that as --model_name_or_path (or, if it was "
            f"moved, correct {CONFIG_FILE} in the adapter's directory)"
        )

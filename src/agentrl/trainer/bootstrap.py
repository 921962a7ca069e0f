"""The start of a trainer process, shared by reinforcement learning and supervised fine-tuning.

    run_on_ranks ──rank 0──────> lead: checks, start weights ──> training_session ──> training loop
               └──other ranks──> worker_loop: executes the learner calls that rank 0 broadcasts

`python`, `torchrun` and `accelerate launch` can all start the process. Only rank 0 accesses the
store and the servers. This module is independent of the source of a step's samples.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.config.optimizer_arguments import parse_optim_args
from agentrl.config.sections import ModelSection, RootConfig, RunSection, TrainerSection
from agentrl.config.validation.rank_checks import check_mesh
from agentrl.distributed import MeshShape, Ranks, joined_ranks
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
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.processes.heap import keep_freed_memory
from agentrl.runtime.processes.signals import stop_on_signals
from agentrl.runtime.telemetry.prometheus import metrics_endpoint
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.trainer.checkpoint import Checkpoint
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights, adapter_shape
from agentrl.trainer.learner.worker_group import WorkerGroup, worker_loop
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.reporting import append_metrics, rewind_metrics
from agentrl.trainer.metrics.trackers import Trackers, open_trackers
from agentrl.trainer.metrics.trainer_metrics import trainer_metrics

T = TypeVar("T")

Lead = Callable[[Ranks, asyncio.Event], Awaitable[T]]
"""The work of rank 0; it returns when it is done, or soon after the event is set."""


@dataclass(frozen=True)
class _Start:
    """The first message of rank 0 to the other ranks."""

    settings: LearnerSettings | None
    """None: rank 0 failed before it had settings, and the other ranks exit."""


def run_on_ranks(name: str, config: RootConfig, lead: Lead[T]) -> T | None:
    """Join the trainer's process group and run this rank's part of the work.

    Args:
        name: name of the process in its log.
        config: the resolved configuration.
        lead: the work of rank 0; the first SIGTERM or SIGINT sets its event.

    Returns:
        The result of `lead`; None on ranks other than 0.
    """
    setup_logging(f"{name}-{os.environ.get('RANK', '0')}")
    if config.trainer.trainer_threads is not None:
        torch.set_num_threads(config.trainer.trainer_threads)
    keep_freed_memory()
    # Otherwise every export of weights prints a progress bar into the log.
    disable_progress_bar()

    async def lead_until_signaled() -> T:
        return await lead(ranks, stop_on_signals("finishing and saving the step first"))

    def shape(world_size: int) -> MeshShape:
        return mesh_shape(config.trainer, world_size)

    with _flushed_subnormals(), joined_ranks(shape) as ranks:
        if ranks.is_main:
            return asyncio.run(lead_until_signaled())
        start: _Start = ranks.broadcast(None)
        if start.settings is not None:
            worker_loop(start.settings, ranks)
        return None


@contextmanager
def _flushed_subnormals() -> Iterator[None]:
    """Flush subnormal results to zero in this thread and its children.

    Recurrent decays produce many, and multiplying them is up to 17 times slower on a CPU.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def ending_ranks_on_error(ranks: Ranks) -> Iterator[None]:
    """If the block fails, tell the other ranks, which wait for their settings, to exit."""
    try:
        yield
    except BaseException:
        ranks.broadcast(_Start(None))
        raise


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
async def learners(
    ranks: Ranks, settings: LearnerSettings, state_path: Path | None
) -> AsyncIterator[WorkerGroup]:
    """Load the model on all ranks, and the optimizer's state if one is given."""
    ranks.broadcast(_Start(settings))
    async with WorkerGroup(ranks, settings) as group:
        if state_path is not None:
            await group.load_state(state_path)
        yield group


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
            stack.enter_context(
                metrics_endpoint(
                    config.run.metrics_host,
                    config.run.metrics_port,
                    lambda: trainer_metrics(history),
                )
            )
            yield TrainingSession(config.run, settings.trainer, group, history, trackers, stop)


def state_to_resume(checkpoint: Checkpoint | None, max_steps: int) -> Path | None:
    """Return the directory of the optimizer state to load, or None if no step needs it.

    Raises:
        ConfigError: steps remain, but the checkpoint was saved without optimizer state.
    """
    if checkpoint is None or checkpoint.step >= max_steps:
        return None
    return checkpoint.state_path


def check_trainer_flags(trainer: TrainerSection) -> None:
    """Check the optimizer arguments, and that the trackers are installed.

    Raises:
        ConfigError: a value cannot be used; the text names the flag.
    """
    parse_optim_args(trainer.optim_args)
    check_trackers(trainer.report_to)


def mesh_shape(trainer: TrainerSection, world_size: int) -> MeshShape:
    """Return the mesh of `world_size` ranks.

    Raises:
        ConfigError: the flags require a different number of ranks.
    """
    check_mesh(trainer, world_size)
    return MeshShape.of(
        world_size,
        dp_replicate=trainer.dp_replicate_size,
        cp=trainer.cp_size,
        ep=trainer.ep_size,
        tp=trainer.tp_size,
        pp=trainer.pp_size,
    )


def start_weights(
    model: ModelSection, checkpoint: Checkpoint | None, shape: MeshShape
) -> StartWeights:
    """Return the weights to start from: the newest checkpoint's, else those of the given model.

    Args:
        model: the model, and the adapter if one is trained.
        checkpoint: the newest checkpoint, if there is one.
        shape: the mesh, which must divide the model.

    Raises:
        ConfigError: the model is missing or does not fit the mesh, or the checkpoint was trained
            with other flags.
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
    check_stages(config, shape.pp, trust_remote_code=trusted)
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

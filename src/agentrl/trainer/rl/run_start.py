"""The start of a training on rank 0: its checks, its place in the database, its learners and trackers.

Input: the resolved configuration. Output: what a training loop works with. Supervised fine-tuning,
which has no place in a database, shares the second half.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Literal

from agentrl.config.loading import flat_values
from agentrl.config.own_function import with_sources
from agentrl.config.sections import (
    AlgorithmSection,
    ModelSection,
    RootConfig,
    RunSection,
    TrainerSection,
)
from agentrl.config.validation.algorithm_checks import check_training
from agentrl.config.validation.checks import groups_per_step
from agentrl.datasets.task_feed import TaskFeed
from agentrl.datasets.task_source import generated_tasks
from agentrl.datasets.task_stream import append_tasks, train_tasks
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
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.runtime.processes.process_identity import this_user
from agentrl.runtime.telemetry.prometheus import metrics_endpoint
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.schema import Control, Run, Task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup, learners
from agentrl.trainer.checkpoint import (
    Checkpoint,
    check_has_database,
    checkpoint_paths,
    checkpoint_to_resume,
)
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights, adapter_shape
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.metrics_file import append_metrics, rewind_metrics
from agentrl.trainer.metrics.trackers import Trackers, open_trackers, trainer_metrics
from agentrl.trainer.text_digests import text_digests
from agentrl.trainer.trainer_lease import trainer_lease

_OUTAGE_SECONDS = 300.0
"""How long the trainer retries while MongoDB is away: as long as a private mongod may take to start.

A trainer that ends instead loses its steps since the last checkpoint.
"""
_STOPPING_OUTAGE_SECONDS = 5.0
"""The same once the trainer is told to stop: a launcher that was killed takes its mongod along."""


@dataclass(frozen=True)
class OpenedRun:
    """A run in its database, whose trainer is this process."""

    store: TrajectoryStore
    feed: TaskFeed
    control: Control
    """Initial size and freshness of the steps."""
    checkpoint: Checkpoint | None
    """The checkpoint to resume, if there is one."""


@asynccontextmanager
async def opened_run(
    config: RootConfig, dp_size: int, stop: asyncio.Event
) -> AsyncIterator[OpenedRun]:
    """Check the flags, connect, prepare the run in the database and hold the trainer's lease.

    Args:
        config: the resolved configuration.
        dp_size: data-parallel ranks, which process different samples.
        stop: set when the trainer is told to stop.
    """
    trainer, consumer = config.trainer, config.trainer.consumer
    check_training(config)
    check_trackers(trainer.report_to)
    uri = config.store.db_connection_string
    if uri is None:
        raise ConfigError(
            "no database: give --db_connection_string or MONGODB_URI (agentrl run starts one)"
        )
    async with (
        TrajectoryStore.connect(
            uri.get_secret_value(), config.run.run_name, outage_seconds=_OUTAGE_SECONDS
        ) as store,
        _impatient_when_stopped(store, stop),
    ):
        control = config.algorithm.control(groups_per_step(config, dp_size))
        first_epoch, later = _training_tasks(config)
        feed = TaskFeed(store, later)
        checkpoint = await _prepare(store, config, control, first_epoch, feed)
        async with trainer_lease(store, consumer, lease_seconds=trainer.trainer_lease_seconds):
            if consumer == DEFAULT_CONSUMER:
                await store.runs.reopen()
                await store.runs.set_phase("loading")
            yield OpenedRun(store, feed, control, checkpoint)


def learner_settings(
    config: RootConfig, checkpoint: Checkpoint | None, shape: MeshShape
) -> LearnerSettings:
    """Return the settings of every rank's learner; it starts from the checkpoint if there is one."""
    return LearnerSettings(
        weights=start_weights(config.model, checkpoint, shape),
        model=config.model,
        trainer=config.trainer,
        algorithm=config.algorithm,
        seed=config.run.seed,
        reference_path=reference_path(config.model, config.algorithm),
        starts_in_host_memory=config.inference.colocated,
    )


@asynccontextmanager
async def _impatient_when_stopped(
    store: TrajectoryStore, stop: asyncio.Event
) -> AsyncIterator[None]:
    async def shorten() -> None:
        await stop.wait()
        store.database.outage_seconds = _STOPPING_OUTAGE_SECONDS

    waiting = asyncio.create_task(shorten())
    try:
        yield
    finally:
        await end_tasks([waiting])


def _training_tasks(config: RootConfig) -> tuple[Iterator[Task], Iterator[Task]]:
    """Return the tasks that are added at the start, and those that are added as steps need them."""
    tasks = train_tasks(config.data, config.run.seed)
    generated = generated_tasks(config.data, config.run.seed)
    epochs = (epoch for _, epoch in groupby(tasks, attrgetter("epoch")))
    first = chain.from_iterable(islice(epochs, 1))
    return first, chain(chain.from_iterable(epochs), generated)


async def _prepare(
    store: TrajectoryStore,
    config: RootConfig,
    control: Control,
    first_epoch: Iterator[Task],
    feed: TaskFeed,
) -> Checkpoint | None:
    """Prepare the database and return the checkpoint to resume, if there is one."""
    output_path = config.run.output_path
    newest = max(checkpoint_paths(output_path), default=None)
    check_has_database(newest, await store.runs.get())
    checkpoint = await asyncio.to_thread(checkpoint_to_resume, output_path)
    if config.trainer.consumer != DEFAULT_CONSUMER:
        if await store.runs.get() is None:
            raise ConfigError(
                f"run {config.run.run_name!r} does not exist yet; start its main trainer before "
                f"--consumer {config.trainer.consumer}"
            )
        return checkpoint
    await store.ensure_schema()
    await store.runs.create(
        Run(
            name=config.run.run_name,
            config=with_sources(flat_values(config)),
            control=control,
            flag_control=control,
        )
    )
    await store.runs.set_owner(this_user())
    digests = await asyncio.to_thread(text_digests, config.model)
    await store.runs.set_text_digests(digests)
    await store.runs.apply_flags(control)
    # All questions are added now, so that questions added later cannot take their ids. Further
    # epochs, and chosen questions, are added as the steps need them.
    await append_tasks(store, first_epoch)
    await feed.fill(1)
    if await store.tasks.count(split="train") == 0:
        raise ConfigError(
            f"database {store.database_name!r} holds no training tasks; give --train_file, --env, or "
            "a --sampler_module with train_tasks(seed)"
        )
    return checkpoint


def reference_path(model: ModelSection, algorithm: AlgorithmSection) -> Path | None:
    """Return the reference model of the KL penalty; None if no second model is loaded."""
    if algorithm.kl_coefficient == 0.0:
        return None
    if algorithm.reference_model is None and model.lora_rank:
        return None  # the policy holds its base model, which is the reference
    if algorithm.reference_model is None:
        return resolve_model(model.model_name_or_path)
    return resolve_model(algorithm.reference_model, flag="reference_model")


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

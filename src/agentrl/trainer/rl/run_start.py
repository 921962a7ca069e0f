"""The start of a training run on rank 0: its checks, its place in the database, its learners' settings.

Input: the resolved configuration. Output: the run as the training loop works on it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path

import torch

from agentrl.config.loading import flat_values
from agentrl.config.own_function import with_sources
from agentrl.config.sections import (
    AlgorithmSection,
    ModelSection,
    RootConfig,
    RunSection,
    StoreSection,
    TrainerSection,
)
from agentrl.config.validation.algorithm_checks import check_training_sampling
from agentrl.config.validation.checks import groups_per_step
from agentrl.datasets.task_feed import RepeatedQuestions, TaskFeed
from agentrl.datasets.task_source import generated_tasks
from agentrl.datasets.task_stream import append_tasks, train_tasks
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError
from agentrl.inference.weight_sync import AdapterNames, PolicyFiles, PolicyPublisher
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery
from agentrl.inference.weight_sync.delivery import Delivery
from agentrl.inference.weight_sync.ipc_delivery import IpcDelivery
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.runtime.processes.process_identity import this_user
from agentrl.schema import Control, Run, Task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.checkpoint import (
    Checkpoint,
    check_has_database,
    checkpoint_paths,
    checkpoint_to_resume,
)
from agentrl.trainer.learner.settings import LearnerSettings
from agentrl.trainer.rl.old_steps import retain
from agentrl.trainer.text_digests import text_digests
from agentrl.trainer.trainer_lease import trainer_lease
from agentrl.trainer.training_session import (
    check_trainer_flags,
    start_weights,
)

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
    _check_flags(config.run, trainer)
    check_training_sampling(config.sampling)
    async with (
        _connect(config.store, config.run.run_name) as store,
        _impatient_when_stopped(store, stop),
    ):
        first_epoch, further_epochs = _training_tasks(config)
        feed = TaskFeed(store, further_epochs, _repeated_questions(store, config))
        control = config.algorithm.control(groups_per_step(config, dp_size))
        checkpoint = await _prepare(store, config, control, first_epoch, feed)
        lease = trainer_lease(store, consumer, lease_seconds=trainer.trainer_lease_seconds)
        async with lease:
            if consumer == DEFAULT_CONSUMER:
                await store.runs.reopen()
                await store.runs.set_phase("loading")
            background = [asyncio.create_task(retain(store, config))]
            try:
                yield OpenedRun(store, feed, control, checkpoint)
            finally:
                await end_tasks(background)


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


def _check_flags(run: RunSection, trainer: TrainerSection) -> None:
    check_trainer_flags(trainer)
    consumer = trainer.consumer
    if consumer != DEFAULT_CONSUMER and run.output_dir is None:
        raise ConfigError(f"--consumer {consumer} needs a separate --output_dir")
    if consumer != DEFAULT_CONSUMER and trainer.eval_strategy != "no":
        raise ConfigError(
            f"--consumer {consumer} publishes no weights, so the run's servers cannot evaluate "
            "them; use --eval_strategy no, and `agentrl eval` later"
        )


def _connect(section: StoreSection, run_name: str) -> AbstractAsyncContextManager[TrajectoryStore]:
    uri = section.db_connection_string
    if uri is None:
        raise ConfigError(
            "no database: give --db_connection_string or MONGODB_URI (agentrl run starts one)"
        )
    return TrajectoryStore.connect(uri.get_secret_value(), run_name, outage_seconds=_OUTAGE_SECONDS)


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
    """Return the tasks of the first epoch, and those of all further epochs, both lazily."""
    tasks = train_tasks(config.data, config.run.seed)
    epochs = (epoch for _, epoch in groupby(tasks, attrgetter("epoch")))
    generated = generated_tasks(config.data, config.run.seed)
    first = chain.from_iterable(islice(epochs, 1))
    return first, chain(chain.from_iterable(epochs), generated)


def _repeated_questions(store: TrajectoryStore, config: RootConfig) -> RepeatedQuestions | None:
    """Return the selection of questions for later epochs; None to ask all of them."""
    probability = config.algorithm.repeat_equal_probability
    return None if probability == 1 else RepeatedQuestions(store, probability, config.run.seed)


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
    # epochs are added as the steps need them.
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


def publisher_of(
    store: TrajectoryStore, config: RootConfig, group: WorkerGroup
) -> PolicyPublisher | PolicyFiles:
    """Return what publishes the weights: to the servers, or for a further consumer to files only."""
    root = config.run.output_path / "policy"
    if config.trainer.consumer != DEFAULT_CONSUMER:
        return PolicyFiles(root, keep=config.publish.keep_policies)
    delivery: Delivery | None = None
    if config.publish.weight_sync == "ipc":
        delivery = IpcDelivery(config.publish, group.send_weights)
    elif config.publish.weight_sync == "distributed":
        # The embedded engine has no GPU.
        on_gpus = torch.cuda.is_available() and config.inference.inference_backend == "sglang"
        delivery = BroadcastDelivery(
            config.publish, group.send_weights, "nccl" if on_gpus else "gloo"
        )
    return PolicyPublisher(
        store,
        root,
        publish=config.publish,
        inference=config.inference,
        adapters=AdapterNames(config.run.run_name) if config.model.lora_rank else None,
        delivery=delivery,
    )

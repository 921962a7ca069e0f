"""The trainer process: `train(config)` on every rank.

Plain python, `torchrun` and `accelerate launch` start it alike. Rank 0 talks to the store and the
servers; the other ranks compute what it tells them.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.config.checks import check_trackers, groups_per_step
from agentrl.config.loading import flat_values
from agentrl.config.sections import RootConfig
from agentrl.datasets.task_stream import eval_tasks, train_tasks
from agentrl.distributed import MeshShape, Ranks, joined_ranks
from agentrl.errors import ConfigError
from agentrl.inference.weight_sync import AdapterNames, PolicyFiles, PolicyPublisher
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery
from agentrl.models.load import read_config
from agentrl.models.parallel import check_parallel_support
from agentrl.models.resolve import check_adapter_targets, check_router_replay, resolve_model
from agentrl.runtime.atomic_directory import clear_leftovers
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.prometheus import metrics_endpoint
from agentrl.runtime.signals import stop_on_signals
from agentrl.schema import Control, Run, Task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.checkpoint.checkpoint import Checkpoint, checkpoints_root, latest_checkpoint
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.optimizer import parse_optim_args
from agentrl.trainer.metrics.history import History
from agentrl.trainer.metrics.reporting import rewind_metrics
from agentrl.trainer.metrics.trackers import open_trackers
from agentrl.trainer.metrics.trainer_metrics import trainer_metrics
from agentrl.trainer.rl.training_loop import TrainLoop, TrainResult
from agentrl.trainer.start_weights import StartWeights, start_weights
from agentrl.trainer.trainer_lease import trainer_lease
from agentrl.trainer.worker_group import Team, follow

logger = logging.getLogger(__name__)

STOPS_WITH = "the step is finished and saved first"
_TASKS_AT_A_TIME = 500


def train(config: RootConfig) -> TrainResult | None:
    """Train one run, resuming it where it was left.

    Args:
        config: the resolved configuration; sections are handed down from here.

    Returns:
        How it ended; None on ranks other than 0.

    Raises:
        ConfigError: something that the user gave cannot be used. Nothing was changed then.
        TrainerBusy: another trainer works on this run.
        StoreError: the store failed, or an evaluation did not finish in time.
        TrainingError: losses or gradients stay non-finite.
    """
    setup_logging(f"trainer-{os.environ.get('RANK', '0')}")
    if config.trainer.trainer_threads is not None:
        torch.set_num_threads(config.trainer.trainer_threads)
    # A bar for every published version would fill the log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with joined_ranks(lambda world_size: mesh_shape(config, world_size)) as ranks:
        if ranks.is_main:
            return asyncio.run(_lead_until_signalled(config, ranks))
        _follow(config, ranks)
        return None


@dataclass(frozen=True)
class _Start:
    """What the ranks have to agree on before they load anything; None: rank 0 gave up."""

    weights: StartWeights | None


async def _lead_until_signalled(config: RootConfig, ranks: Ranks) -> TrainResult:
    return await lead(config, ranks, stop=stop_on_signals(STOPS_WITH))


async def lead(config: RootConfig, ranks: Ranks, *, stop: asyncio.Event) -> TrainResult:
    """Do what `train` does on rank 0, inside a running event loop.

    Args:
        config: the resolved configuration.
        ranks: this process, rank 0.
        stop: setting it ends the run after the current step, with a checkpoint.
    """
    async with AsyncExitStack() as stack:
        try:
            _check(config)
            store = await stack.enter_async_context(_connect(config))
            checkpoint = await _open_run(store, config, ranks)
            await stack.enter_async_context(
                trainer_lease(
                    store,
                    config.trainer.consumer,
                    lease_seconds=config.trainer.trainer_lease_seconds,
                )
            )
            weights = start_weights(config.model, checkpoint)
            check_mesh(config, ranks, weights.model_path)
            state = _state_path(config, checkpoint)
        except BaseException:
            ranks.broadcast(_Start(None))
            raise
        ranks.broadcast(_Start(weights))
        colocated = config.inference.colocated
        team = await stack.enter_async_context(
            Team(ranks, lambda: make_learner(config, ranks, weights, shares_device=colocated))
        )
        if state is not None:
            await team.load_state(state)
        history = checkpoint.history if checkpoint else History()
        rewind_metrics(config.run.output_path, history)
        trackers = open_trackers(config)
        stack.callback(trackers.finish)
        stack.enter_context(
            metrics_endpoint(
                config.run.metrics_host,
                config.run.metrics_port,
                lambda: trainer_metrics(history),
            )
        )
        logger.info("run %s: %d step(s) done so far", config.run.run_name, history.last_step)
        loop = TrainLoop(
            config,
            store=store,
            team=team,
            publisher=_publisher(store, config, team),
            history=history,
            trackers=trackers,
            eval_tasks=eval_tasks(config.data, 0) if config.trainer.eval_strategy != "no" else [],
            stop=stop,
        )
        result = await loop.run()
        logger.info("%s after step %d; see %s", result.status, result.step, result.summary_path)
        return result


def mesh_shape(config: RootConfig, world_size: int) -> MeshShape:
    """Return how so many ranks share the work.

    Raises:
        ConfigError: they do not fill the mesh that the flags ask for, or are too few for them.
    """
    trainer = config.trainer
    if trainer.cpu_offload and world_size == 1:
        raise ConfigError(
            "--cpu_offload is FSDP2's, which one process alone does not use; start several ranks "
            "(--num_processes), or save memory with --gradient_checkpointing true"
        )
    if config.inference.colocated and world_size > 1:
        raise ConfigError(
            f"--colocated is for one device, with one trainer process, not {world_size}; start one, "
            "or give the servers devices of their own"
        )
    return MeshShape.of(
        world_size,
        dp_replicate=trainer.dp_replicate_size,
        cp=trainer.cp_size,
        ep=trainer.ep_size,
        tp=trainer.tp_size,
    )


def check_mesh(config: RootConfig, ranks: Ranks, model_path: Path) -> None:
    """Refuse a mesh that the model does not go into, and flags that it has no use for.

    Raises:
        ConfigError: names the flag.
    """
    if config.model.router_replay:
        check_router_replay(model_path)
    if config.model.lora_rank:
        check_adapter_targets(model_path, config.model.lora_target_modules)
    trust_remote_code = config.model.trust_remote_code
    check_parallel_support(
        read_config(model_path, trust_remote_code=trust_remote_code), ranks.shape
    )


def _publisher(
    store: TrajectoryStore, config: RootConfig, team: Team
) -> PolicyPublisher | PolicyFiles:
    root = config.run.output_path / "policy"
    if config.trainer.consumer != DEFAULT_CONSUMER:
        return PolicyFiles(root, keep=config.publish.keep_policies)
    delivery = None
    if config.publish.weight_sync == "distributed":
        # The embedded engine has no GPU.
        on_gpus = torch.cuda.is_available() and config.inference.inference_backend == "sglang"
        delivery = BroadcastDelivery(
            config.publish, team.send_weights, "nccl" if on_gpus else "gloo"
        )
    return PolicyPublisher(
        store,
        root,
        publish=config.publish,
        inference=config.inference,
        adapters=AdapterNames(config.run.run_name) if config.model.lora_rank else None,
        delivery=delivery,
    )


def _follow(config: RootConfig, ranks: Ranks) -> None:
    start: _Start = ranks.broadcast(None)
    if start.weights is not None:
        follow(make_learner(config, ranks, start.weights), ranks)


async def _open_run(store: TrajectoryStore, config: RootConfig, ranks: Ranks) -> Checkpoint | None:
    """Create what is missing in the database and return the checkpoint to go on from.

    Raises:
        ConfigError: files and database do not belong together, or there is nothing to train on.
    """
    output_path = config.run.output_path
    clear_leftovers(checkpoints_root(output_path))
    checkpoint = latest_checkpoint(output_path)
    if checkpoint is not None and await store.runs.get() is None:
        raise ConfigError(
            f"{checkpoint.path} is the checkpoint of a run whose database is empty; use another "
            "--run_name, or --fresh --delete_existing to start anew"
        )
    if config.trainer.consumer != DEFAULT_CONSUMER:
        if await store.runs.get() is None:
            raise ConfigError(
                f"run {config.run.run_name!r} does not exist yet; start its trainer before the "
                f"one that reads along as {config.trainer.consumer!r}"
            )
        return checkpoint
    control = Control(
        max_staleness=config.algorithm.max_staleness,
        groups_per_step=groups_per_step(config, ranks.shape.dp_size),
    )
    await store.ensure_schema()
    await store.runs.create(
        Run(
            name=config.run.run_name,
            config=flat_values(config),
            control=control,
            flag_control=control,
        )
    )
    await store.runs.apply_flags(control)
    await store.tasks.add(read_beside(train_tasks(config.data, config.run.seed)))
    if await store.tasks.count(split="train") == 0:
        raise ConfigError(
            f"database {store.database_name!r} holds no training tasks; give --train_file"
        )
    return checkpoint


async def read_beside(tasks: Iterator[Task]) -> AsyncIterator[Task]:
    """Yield tasks that are read in other threads: a file of a million lines blocks no event loop."""
    while batch := await asyncio.to_thread(lambda: list(islice(tasks, _TASKS_AT_A_TIME))):
        for task in batch:
            yield task


def make_learner(
    config: RootConfig,
    ranks: Ranks,
    weights: StartWeights,
    *,
    shares_device: bool = False,
    fine_tunes: bool = False,
) -> Learner:
    """Load this rank's model (collective); into host memory, where the device is others' by turns."""
    return Learner(
        weights,
        ranks=ranks,
        model=config.model,
        trainer=config.trainer,
        algorithm=None if fine_tunes else config.algorithm,
        seed=config.run.seed,
        reference_path=None if fine_tunes else _reference_path(config),
        starts_in_host_memory=shares_device,
    )


def _reference_path(config: RootConfig) -> Path | None:
    reference = config.algorithm.reference_model
    if config.algorithm.kl_coefficient == 0.0:
        return None
    if reference is None and config.model.lora_rank:
        return None  # the policy holds its base model, which is the reference
    return resolve_model(reference or config.model.model_name_or_path)


def _state_path(config: RootConfig, checkpoint: Checkpoint | None) -> Path | None:
    if checkpoint is None or checkpoint.step >= config.trainer.max_steps:
        return None
    return checkpoint.state_path


def _connect(config: RootConfig) -> AbstractAsyncContextManager[TrajectoryStore]:
    uri = config.store.db_connection_string
    if uri is None:
        raise ConfigError(
            "no database: give --db_connection_string or MONGODB_URI (agentrl run starts one)"
        )
    return TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name)


def _check(config: RootConfig) -> None:
    parse_optim_args(config.trainer.optim_args)
    check_trackers(config.trainer.report_to)
    consumer = config.trainer.consumer
    if consumer != DEFAULT_CONSUMER and config.run.output_dir is None:
        raise ConfigError(f"--consumer {consumer} needs an --output_dir of its own")
    if consumer != DEFAULT_CONSUMER and config.trainer.eval_strategy != "no":
        raise ConfigError(
            f"--consumer {consumer} publishes no weights, so that they cannot be evaluated on "
            "the run's servers; use --eval_strategy no, and `agentrl eval` later"
        )

"""The ranks of a trainer process: their start, and the calls that they execute together.

    run_on_ranks ──rank 0──────> lead: checks, start weights ──> training_session ──> training loop
               └──other ranks──> worker_loop: executes the learner calls that rank 0 broadcasts

`python`, `torchrun` and `accelerate launch` can all start the process. Only rank 0 accesses the
store and the servers. Every operation on the model is collective. Rank 0 broadcasts the call and
executes it in a worker thread, which keeps its event loop (leases, servers) running. Independent of
the source of a step's samples: reinforcement learning and supervised fine-tuning start the same way.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.config.sections import AlgorithmSection, RootConfig, TrainerSection
from agentrl.config.validation.placement_checks import check_mesh
from agentrl.data import MicroBatch
from agentrl.distributed import MeshShape, Ranks, joined_ranks
from agentrl.distributed.broadcast import Bucket
from agentrl.errors import ConfigError
from agentrl.runtime.ending_tasks import joint_tasks
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.processes.memory import keep_freed_memory
from agentrl.runtime.processes.signals import stop_on_signals
from agentrl.trainer.learner.function_trial import problem_of_functions
from agentrl.trainer.learner.learner import Learner, StepOutcome, TargetScores
from agentrl.trainer.learner.merge_check import MergeCheck
from agentrl.trainer.learner.settings import LearnerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
FINISHING = "saving the last step first"
"""What a trainer does after a signal."""
Shares = Sequence[Sequence[MicroBatch]]
"""Micro-batches of each share of the work; all shares have the same number."""
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

    Raises:
        ConfigError: a function of the user cannot be used on some rank; on all ranks alike.
    """
    setup_logging(f"{name}-{os.environ.get('RANK', '0')}")

    async def lead_until_signaled() -> T:
        return await lead(ranks, stop_on_signals(FINISHING))

    with rank_of(config) as ranks:
        if ranks.is_main:
            return asyncio.run(lead_until_signaled())
        follow(ranks)
        return None


@contextmanager
def rank_of(config: RootConfig) -> Iterator[Ranks]:
    """Join the trainer's process group, and prepare this process for its share of the work.

    Raises:
        ConfigError: a function of the user cannot be used on some rank; on all ranks alike.
    """
    trainer = config.trainer
    if trainer.trainer_threads is not None:
        torch.set_num_threads(trainer.trainer_threads)
    keep_freed_memory()
    # Otherwise every export of weights prints a progress bar into the log.
    disable_progress_bar()

    def shape(world_size: int) -> MeshShape:
        return mesh_shape(trainer, world_size)

    with _flushed_subnormals(), joined_ranks(shape) as ranks:
        problem = problem_of_functions(config, ranks)
        if problem is not None:
            raise ConfigError(problem)
        yield ranks


def follow(ranks: Ranks) -> None:
    """Do what rank 0 asks for until it ends (ranks other than 0)."""
    start: _Start = ranks.broadcast(None)
    if start.settings is not None:
        worker_loop(start.settings, ranks)


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


@dataclass(frozen=True)
class _CollectiveCall:
    """An operation of the learner, as rank 0 broadcasts it."""

    operation: Callable[..., Any] | None
    """A method of `Learner`; None ends the loop."""
    num_batches: int = 0
    """Leading arguments, scattered after the call: each rank receives only its own share."""
    arguments: dict[str, Any] | None = None
    """Keyword arguments, equal on all ranks."""

    def execute(
        self, learner: Learner, ranks: Ranks, batches: Sequence[Shares] = (), **on_main: Any
    ) -> Any:
        """Execute the call on this rank.

        Args:
            learner: this rank's learner.
            ranks: this process among its peers.
            batches: the arguments to scatter, on rank 0 only.
            on_main: further keyword arguments, on rank 0 only.
        """
        if self.operation is None:
            return learner.wait_saved()
        local_batches = [
            ranks.scatter([list(share) for share in batches[number]] if ranks.is_main else None)
            for number in range(self.num_batches)
        ]
        return self.operation(learner, *local_batches, **(self.arguments or {}), **on_main)


class WorkerGroup:
    """The learners of all ranks, as rank 0 sees them (async context manager)."""

    def __init__(self, ranks: Ranks, settings: LearnerSettings) -> None:
        """Prepare the thread of operations; entering the context loads this rank's model.

        Args:
            ranks: this process (rank 0) among its peers.
            settings: the other ranks load their models with the same settings at the same time.
        """
        self._ranks = ranks
        self._settings = settings
        # One thread, because collectives and random states need one order of operations.
        self._thread = ThreadPoolExecutor(1, "learner", initializer=ranks.enter_thread)
        self._is_broken = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    @property
    def dp_size(self) -> int:
        """Number of shares into which a step's work is divided."""
        return self._ranks.shape.dp_size

    @property
    def attention_cost(self) -> float:
        """Cost of a visible pair in units of a token's cost outside attention, for packing."""
        return self._learner.attention_cost

    async def __aenter__(self) -> Self:
        self._learner = await asyncio.get_running_loop().run_in_executor(
            self._thread, Learner, self._settings, self._ranks
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        # After a failed operation, the other ranks may be waiting inside it, where a broadcast
        # would not reach them; they exit when this process closes its connections.
        if not self._is_broken:
            await self._on_all_ranks(None)
        self._thread.shutdown(wait=not self._is_broken)

    async def forward_backward(
        self, shares: Shares, algorithm: AlgorithmSection | None = None
    ) -> float:
        """Add the gradients of a batch to those since the last `optim_step`; return its loss.

        Args:
            shares: the micro-batches of the batch.
            algorithm: loss settings in place of those of the flags.
        """
        return await self._on_all_ranks(Learner.forward_backward, shares, algorithm=algorithm)

    async def unless_stopped(
        self, computing: Coroutine[Any, Any, object], stop: asyncio.Event
    ) -> bool:
        """Await `forward_backward`; return False if `stop` ended it, and its gradients are discarded.

        A single rank ends after its micro-batch in progress. Several compute every micro-batch
        together, and finish.
        """
        async with joint_tasks() as tasks:
            job = tasks.create_task(computing)
            stopping = tasks.create_task(stop.wait())
            await asyncio.wait({job, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            is_stopped = not job.done() and self.num_ranks == 1
            if is_stopped:
                logger.info("the step ends before its gradients are whole")
                self._learner.is_abandoned.set()
                await self._on_all_ranks(Learner.discard_gradients)
        return not is_stopped

    async def problem_of_functions(self, config: RootConfig) -> str | None:
        """Return the first mistake of the user's functions on any rank.

        Args:
            config: names the functions.
        """
        return await self._on_all_ranks(Learner.problem_of_functions, config=config)

    async def optim_step(self, num_done: int) -> StepOutcome:
        """Update the weights with the gradients since the last update, after `num_done` steps."""
        return await self._on_all_ranks(Learner.optim_step, num_done=num_done)

    async def check_merge(self, merged: Shares, separate: Shares) -> MergeCheck:
        """Compare the gradients of two packings of one step.

        Args:
            merged: the micro-batches of the step.
            separate: the same turns, unmerged.
        """
        return await self._on_all_ranks(Learner.check_merge, merged, separate)

    async def evaluate(self, shares: Shares) -> float:
        """Return the mean negative logprob of all target tokens."""
        return await self._on_all_ranks(Learner.evaluate, shares)

    async def scores(self, shares: Shares) -> list[TargetScores]:
        """Return the scores of each micro-batch's target tokens; needs a single rank."""
        return await self._on_all_ranks(Learner.scores, shares)

    async def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory."""
        await self._on_all_ranks(Learner.export, path=path)

    async def send_weights(self, max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        """Gather the weights in buckets.

        Args:
            max_bytes: upper bound on a bucket, unless a single tensor is larger.
            sink: called with every bucket, in the thread of collective operations.
        """
        await self._on_all_ranks(Learner.send_weights, on_main={"sink": sink}, max_bytes=max_bytes)

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state for a later `load_state`.

        Args:
            directory: created if missing; on a file system that all ranks share.
            in_background: return as soon as the state is copied; see `wait_saved`.
        """
        await self._on_all_ranks(
            Learner.save_state, directory=directory, in_background=in_background
        )

    async def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote."""
        await self._on_all_ranks(Learner.load_state, directory=directory)

    async def move(self, *, to_device: bool) -> None:
        """Move model and optimizer to the device, or to host memory."""
        await self._on_all_ranks(Learner.move, to_device=to_device)

    async def wait_saved(self) -> None:
        """Return when the state is written by all ranks."""
        # In a different thread than collective operations: the next step trains while the state is
        # written.
        await asyncio.to_thread(self._learner.wait_saved)

    async def _on_all_ranks(
        self,
        operation: Callable[..., T] | None,
        *batches: Shares,
        on_main: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> T:
        call = _CollectiveCall(operation, len(batches), arguments)

        def run() -> T:
            # Broken unless the call returns: after an exception, ranks may still be inside a
            # collective.
            self._is_broken = True
            self._ranks.broadcast(call)
            result: T = call.execute(self._learner, self._ranks, batches, **(on_main or {}))
            self._is_broken = False
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


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


def worker_loop(settings: LearnerSettings, ranks: Ranks) -> None:
    """Load this rank's model and execute the calls of rank 0 until it ends (ranks other than 0)."""
    learner = Learner(settings, ranks)
    # Launchers signal all ranks, but only rank 0 decides when to stop: a rank that left during a
    # collective would leave the others waiting. If rank 0 dies, its closed connection ends this rank.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call: _CollectiveCall | None = None
    while call is None or call.operation is not None:
        call = ranks.broadcast(None)
        call.execute(learner, ranks)

"""The learners of all ranks behind one object on rank 0.

Every operation on the model is collective. Rank 0 broadcasts the call and executes it in a worker
thread, which keeps its event loop (leases, servers) running; the other ranks execute the calls that
they receive in `worker_loop`.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from agentrl.data import MicroBatch
from agentrl.distributed import Ranks
from agentrl.distributed.broadcast import Bucket
from agentrl.trainer.learner.learner import Learner, StepOutcome
from agentrl.trainer.learner.merge_check import MergeCheck
from agentrl.trainer.learner.settings import LearnerSettings

T = TypeVar("T")
Shares = Sequence[Sequence[MicroBatch]]
"""Micro-batches of each share of the work; all shares have the same number."""


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

    async def train(self, shares: Shares) -> StepOutcome:
        """Make one optimizer step."""
        return await self._on_all_ranks(Learner.train, shares)

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

    async def likeliest_token(self, shares: Shares) -> int:
        """Return the likeliest token at the first target; needs a single rank."""
        return await self._on_all_ranks(Learner.likeliest_token, shares)

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

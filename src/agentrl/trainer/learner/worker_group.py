"""All ranks' learners behind one object on rank 0.

Every operation on the model is collective. Rank 0 broadcasts the call and then makes it itself, in
one worker thread, so that its event loop (leases, servers) keeps running; the other ranks make the
calls that they receive in `worker_loop`.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
    """A method of `Learner`; None: no further call follows."""
    num_batches: int = 0
    """Leading arguments, each scattered after the call: a rank receives its own share alone."""
    arguments: dict[str, Any] | None = None
    """The same on every rank."""

    def make(
        self, learner: Learner, ranks: Ranks, batches: Sequence[Shares] = (), **on_main: Any
    ) -> Any:
        """Make the call on this rank.

        Args:
            learner: this rank's.
            ranks: this process among its peers.
            batches: what is scattered; on rank 0 only.
            on_main: further arguments, on rank 0 only.
        """
        if self.operation is None:
            return learner.wait_saved()
        own = [
            ranks.scatter([list(share) for share in batches[number]] if ranks.is_main else None)
            for number in range(self.num_batches)
        ]
        return self.operation(learner, *own, **(self.arguments or {}), **on_main)


class WorkerGroup:
    """The learners of all ranks, as rank 0 sees them (async context manager)."""

    def __init__(self, ranks: Ranks, settings: LearnerSettings) -> None:
        """Prepare the thread of operations; entering the context loads this rank's model.

        Args:
            ranks: this process (rank 0) among its peers.
            settings: the other ranks load theirs from the same at the same time.
        """
        self._ranks = ranks
        self._settings = settings
        # One thread: collectives and random states need one order of operations.
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
        """Work of a visible pair over that of a token outside attention, for packing."""
        return self._learner.attention_cost

    async def __aenter__(self) -> Self:
        self._learner = await asyncio.get_running_loop().run_in_executor(
            self._thread, Learner, self._settings, self._ranks
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a failed operation the others may wait in another collective than the next one;
        # they end when this process does.
        if not self._is_broken:
            await self._on_all_ranks(None)
        self._thread.shutdown(wait=not self._is_broken)

    async def train(self, shares: Shares) -> StepOutcome:
        """Make one optimizer step."""
        return await self._on_all_ranks(Learner.train, shares)

    async def check_merge(self, merged: Shares, separate: Shares) -> MergeCheck:
        """Compare the gradients of two packings of one step.

        Args:
            merged: micro-batches as they are going to be trained on.
            separate: the same turns without merging.
        """
        return await self._on_all_ranks(Learner.check_merge, merged, separate)

    async def evaluate(self, shares: Shares) -> float:
        """Return the mean negative logprob of all target tokens."""
        return await self._on_all_ranks(Learner.evaluate, shares)

    async def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory."""
        await self._on_all_ranks(Learner.export, path=path)

    async def send_weights(self, max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        """Gather the weights part by part.

        Args:
            max_bytes: size of a part, if no single tensor is larger.
            sink: called with every part, in the thread of the ranks' operations.
        """
        await self._on_all_ranks(Learner.send_weights, on_main={"sink": sink}, max_bytes=max_bytes)

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state that a later `load_state` resumes.

        Args:
            directory: to be made, where all ranks see it.
            in_background: return when the state is copied; see `wait_saved`.
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
        # Not in the thread of operations: the next step trains while a state is written.
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
            self._is_broken = True
            self._ranks.broadcast(call)
            result: T = call.make(self._learner, self._ranks, batches, **(on_main or {}))
            self._is_broken = False
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


def worker_loop(settings: LearnerSettings, ranks: Ranks) -> None:
    """Load this rank's model and make the calls of rank 0 until it ends (every rank but 0)."""
    learner = Learner(settings, ranks)
    # Rank 0 decides when to stop; a rank that left on its own would leave the others waiting.
    # It ends with an error when rank 0's connection closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call: _CollectiveCall | None = None
    while call is None or call.operation is not None:
        call = ranks.broadcast(None)
        call.make(learner, ranks)

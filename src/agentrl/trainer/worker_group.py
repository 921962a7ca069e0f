"""Rank 0 leads, the other ranks follow.

Every operation on the model is collective. Rank 0 sends the other ranks a command and then does
the same thing itself, in one worker thread, so that its event loop (leases, servers) goes on.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from agentrl.data import MicroBatch
from agentrl.distributed import Ranks
from agentrl.distributed.broadcast import Bucket
from agentrl.trainer.learner.learner import Learner, StepOutcome
from agentrl.trainer.learner.merge_check import MergeCheck

T = TypeVar("T")


@dataclass(frozen=True)
class _Train:
    """The ranks' micro-batches follow by scatter."""


@dataclass(frozen=True)
class _CheckMerge:
    """Merged and separate micro-batches follow by scatter."""


@dataclass(frozen=True)
class _Evaluate:
    """The ranks' micro-batches follow by scatter."""


@dataclass(frozen=True)
class _Export:
    path: Path


@dataclass(frozen=True)
class _Send:
    max_bytes: int


@dataclass(frozen=True)
class _SaveState:
    directory: Path
    in_background: bool


@dataclass(frozen=True)
class _LoadState:
    directory: Path


@dataclass(frozen=True)
class _Finish:
    """No further command follows."""


_Command = _Train | _CheckMerge | _Evaluate | _Export | _Send | _SaveState | _LoadState | _Finish


class Team:
    """All ranks' learners, as rank 0 sees them (async context manager)."""

    def __init__(self, ranks: Ranks, make_learner: Callable[[], Learner]) -> None:
        """Set up; entering the context makes this rank's learner.

        Args:
            ranks: this process (rank 0) among its peers.
            make_learner: collective; the other ranks make theirs at the same time.
        """
        self._ranks = ranks
        self._make_learner = make_learner
        # One thread: collectives and random states need one order of operations.
        self._thread = ThreadPoolExecutor(1, "learner", initializer=ranks.enter_thread)
        self._is_broken = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    @property
    def num_shares(self) -> int:
        """Number of shares into which a step's work is divided."""
        return self._ranks.shape.dp_size

    @property
    def pair_cost(self) -> float:
        """What a visible pair takes over what a token outside attention takes; packing asks."""
        return self._learner.pair_cost

    async def __aenter__(self) -> Self:
        self._learner = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._make_learner
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
            await self._do(_Finish(), self._learner.wait_saved)
        self._thread.shutdown(wait=not self._is_broken)

    async def train(self, shares: Sequence[Sequence[MicroBatch]]) -> StepOutcome:
        """Make one optimizer step.

        Args:
            shares: micro-batches of each share of the work; all have the same number.
        """
        return await self._do(
            _Train(), lambda: self._learner.train(self._ranks.scatter([list(s) for s in shares]))
        )

    async def check_merge(
        self, merged: Sequence[Sequence[MicroBatch]], separate: Sequence[Sequence[MicroBatch]]
    ) -> MergeCheck:
        """Compare the gradients of two packings of one step.

        Args:
            merged: micro-batches of each share as they are going to be trained on.
            separate: the same turns without merging.
        """

        def check() -> MergeCheck:
            shares = [self._ranks.scatter([list(s) for s in way]) for way in (merged, separate)]
            return self._learner.check_merge(*shares)

        return await self._do(_CheckMerge(), check)

    async def evaluate(self, shares: Sequence[Sequence[MicroBatch]]) -> float:
        """Return the mean negative logprob of all terms.

        Args:
            shares: micro-batches of each rank; every rank has the same number.
        """
        return await self._do(
            _Evaluate(),
            lambda: self._learner.evaluate(self._ranks.scatter([list(s) for s in shares])),
        )

    async def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory."""
        await self._do(_Export(path), lambda: self._learner.export(path))

    async def send_weights(self, max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        """Gather the weights part by part.

        Args:
            max_bytes: size of a part, if no single tensor is larger.
            sink: called with every part, in the thread of the ranks' operations.
        """
        await self._do(_Send(max_bytes), lambda: self._learner.send_weights(max_bytes, sink))

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state that a later `load_state` goes on from.

        Args:
            directory: to be made, where all ranks see it.
            in_background: return when the state is copied; see `wait_saved`.
        """
        await self._do(
            _SaveState(directory, in_background),
            lambda: self._learner.save_state(directory, in_background=in_background),
        )

    async def wait_saved(self) -> None:
        """Return when the state is written by all ranks."""
        await asyncio.to_thread(self._learner.wait_saved)

    async def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote."""
        await self._do(_LoadState(directory), lambda: self._learner.load_state(directory))

    async def move(self, *, to_device: bool) -> None:
        """Bring model and optimizer to the device, or take them to host memory (one rank only)."""
        assert self.num_ranks == 1, "other ranks would have to be told"
        await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._learner.move(to_device=to_device)
        )

    async def _do(self, command: _Command, operation: Callable[[], T]) -> T:
        def lead() -> T:
            self._is_broken = True
            self._ranks.broadcast(command)
            result = operation()
            self._is_broken = False
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, lead)


def follow(learner: Learner, ranks: Ranks) -> None:
    """Do what rank 0 says until it says that it is over (every rank but 0)."""
    # Rank 0 decides when to stop; a follower that left on its own would leave the others waiting.
    # It ends with an error when rank 0's connection closes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        command: _Command = ranks.broadcast(None)
        match command:
            case _Train():
                learner.train(ranks.scatter(None))
            case _CheckMerge():
                merged: list[MicroBatch] = ranks.scatter(None)
                learner.check_merge(merged, ranks.scatter(None))
            case _Evaluate():
                learner.evaluate(ranks.scatter(None))
            case _Export(path):
                learner.export(path)
            case _Send(max_bytes):
                learner.send_weights(max_bytes, None)
            case _SaveState(directory, in_background):
                learner.save_state(directory, in_background=in_background)
            case _LoadState(directory):
                learner.load_state(directory)
            case _Finish():
                learner.wait_saved()
                return

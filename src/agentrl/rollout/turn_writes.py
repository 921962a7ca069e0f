"""The writes of one rollout: its turns in order, and their tool results and rewards.

Input: turns without an index, tool results, rewards. Output: durable turns. Each write runs in its
own task, which survives the cancellation of its caller. Depends on the store; servers and prompts
belong to the rollout.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentrl.schema import DispatchedSamplingTask, Record, Seat, ToolResult
from agentrl.store import TrajectoryStore


class TurnWrites:
    """Writes the turns of one attempt.

    Args:
        store: the run's store.
        record: the claimed slot.

    Attributes:
        turns: the acknowledged turns, in order.
    """

    def __init__(self, store: TrajectoryStore, record: Record) -> None:
        self.turns: list[DispatchedSamplingTask] = []
        self._store = store
        self._record = record
        self._append_lock = asyncio.Lock()
        self._appends: set[asyncio.Task[DispatchedSamplingTask]] = set()
        self._updates: list[asyncio.Task[None]] = []

    async def append(self, turn: DispatchedSamplingTask) -> DispatchedSamplingTask:
        """Store a turn as the next one; the write continues if the caller is cancelled.

        Returns:
            The turn with its id and its index.
        """
        write = asyncio.create_task(self._append(turn))
        self._appends.add(write)
        write.add_done_callback(self._forget)
        return await asyncio.shield(write)

    def attach_results(self, results: Sequence[ToolResult], index: int) -> None:
        """Store the tool results of a turn; the next turn, and `finish`, wait for it."""
        turn = self.turns[index]
        if turn.tool_results == tuple(results):
            return  # resumed together with its turn
        turn = turn.model_copy(update={"tool_results": tuple(results)})
        self.turns[index] = turn
        writing = self._store.turns.set_tool_results(
            turn.id, self._record.id, self._record.fence, turn.tool_results
        )
        self._updates.append(asyncio.create_task(writing))

    def reward(
        self, rewards: Mapping[int, float], seats: Mapping[int, Seat] = MappingProxyType({})
    ) -> None:
        """Store the rewards of turns, and what their seats earned, by index.

        The next turn and `finish` wait for it.
        """
        if not rewards and not seats:
            return
        for index, reward in rewards.items():
            self.turns[index] = self.turns[index].model_copy(update={"reward": reward})
        for index, seat in seats.items():
            self.turns[index] = self.turns[index].model_copy(update={"seat": seat})
        writing = self._store.turns.set_rewards(
            {self.turns[index].id: reward for index, reward in rewards.items()},
            self._record.id,
            self._record.fence,
            seats={self.turns[index].id: seat for index, seat in seats.items()},
        )
        self._updates.append(asyncio.create_task(writing))

    async def finish(self) -> None:
        """Wait until every write is durable."""
        for write in tuple(self._appends):
            await write
        await self._flush()

    async def discard(self) -> None:
        """Cancel the pending writes, and wait until they have ended."""
        writes: list[asyncio.Task[Any]] = [*self._appends, *self._updates]
        self._updates = []
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)

    def _forget(self, write: asyncio.Task[DispatchedSamplingTask]) -> None:
        self._appends.discard(write)
        if not write.cancelled():
            write.exception()  # otherwise, asyncio would log it as never retrieved

    async def _append(self, turn: DispatchedSamplingTask) -> DispatchedSamplingTask:
        # Serialized: a turn's index is its position among the acknowledged turns.
        async with self._append_lock:
            index = len(self.turns)
            turn_id = f"{self._record.id}/{self._record.fence}/{index}"
            turn = turn.model_copy(update={"id": turn_id, "index": index})
            if self._updates:
                await asyncio.sleep(0)  # starts their writes, which the turn's write then includes
            await self._store.turns.append(turn, self._record.fence)
            self.turns.append(turn)
            await self._flush()
        return turn

    async def _flush(self) -> None:
        while self._updates:
            # It stays in the list until it ends: if it fails, `discard` cancels the others.
            await self._updates[0]
            del self._updates[0]

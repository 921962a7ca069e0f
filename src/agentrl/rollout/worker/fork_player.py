"""Runs the rollouts of a fork: from the parent's stored turns to new, scored Records.

Input: the context of a sampler. Output: finished Records, one by one. The Records are claimed,
leased, scored and abandoned like those of a run (`attempt`), in the store of the forks.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.errors import LeaseLost, ScoringError
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.reply import Reply
from agentrl.rollout.async_sampler import AsyncSampler, LimitReached, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.mcp_sampler import MCPSampler
from agentrl.rollout.recorded_turns import RecordedTurns
from agentrl.rollout.worker.attempt import LeaseRenewal, RolloutAttempt, SlotCounts
from agentrl.rollout.worker.scheduler import sampler_class_for
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.schema import (
    TERMINAL_STATUSES,
    DispatchedSamplingTask,
    Fork,
    MCPTask,
    Record,
    Task,
)
from agentrl.schema.fork import shown_before
from agentrl.store import TrajectoryStore

_ONE_REPLY = "the fork is a single reply: only the task's own agent can continue after it"


class OneReply(AsyncSampler[Task]):
    """Samples the turn of a fork and ends there: only the user's program knows how to continue."""

    def __init__(
        self,
        task: Task,
        record: Record,
        context: RolloutContext,
        point: RecordedTurns,
    ) -> None:
        super().__init__(task, record, context)
        self.play_first(point)
        self._point = point

    async def run(self) -> RolloutResult:
        """Sample one turn."""
        path = {self._point.turn}
        while (parent := self._point.parent[min(path)].parent) is not None:
            path.add(parent)
        main = Conversation([])
        try:
            for index in range(self._point.turn):
                await self._next(main if index in path else Conversation([]), index)
            reply = await self._next(main, self._point.turn, **self._point.first_sampling)
        except LimitReached as limit:
            return RolloutResult(limit.outcome)
        return RolloutResult("turns_limit", reply.content or None)

    async def _next(self, conversation: Conversation, index: int, **sampling: Any) -> Reply:
        conversation.add(*shown_before(self._point.parent, index))
        _, reply = await self.generate(conversation, **sampling)
        return reply

    async def evaluate_record(self, result: RolloutResult) -> float:
        """Leave it unscored."""
        raise ScoringError(_ONE_REPLY)


async def store_fork(store: TrajectoryStore, fork: Fork, task: Task, num_tries: int) -> Task:
    """Store a fork and its pending Records; return its Task, which asks the parent's question."""
    fork_task = task.again(fork.id, num_generations=num_tries, rounds=(), start=None)
    await store.forked.ensure_schema()
    await store.forks.add(fork)
    await store.forked.tasks.add([fork_task])
    [stored] = await store.forked.tasks.get_many([fork_task.id])
    return stored


async def play(
    context: RolloutContext,
    fork: Fork,
    task: Task,
    parent: Sequence[DispatchedSamplingTask],
    *,
    tools_keep_state: bool,
    by_agent: bool,
    max_running: int,
) -> AsyncIterator[Record]:
    """Run the rollouts of a fork, and yield each Record when it has ended.

    Args:
        context: the run's context, with the run's store.
        fork: the starting point of the Records.
        task: the result of `store_fork`.
        parent: all turns of the parent's attempt.
        tools_keep_state: recorded results must replace tool calls.
        by_agent: the user's agent ran the parent.
        max_running: concurrent rollouts.
    """
    point = partial(
        RecordedTurns.before_fork,
        parent,
        fork.turn,
        messages=fork.messages,
        sampling=fork.sampling,
        tools_keep_state=tools_keep_state,
    )
    point()  # raises what every rollout would raise
    runs_to_end = (
        isinstance(task, MCPTask) and not by_agent and sampler_class_for(task) is MCPSampler
    )
    store = context.store.forked
    rollout = context.rollout.model_copy(update={"max_attempts": 1, "scoring": "own"})
    context = replace(context, store=store, rollout=rollout)
    make = partial(_sampler, runs_to_end, point)
    owner, counts = new_lease_owner(), SlotCounts()
    renewal = LeaseRenewal(store, rollout.lease_seconds)
    renewing = asyncio.create_task(renewal.run())
    running: dict[asyncio.Task[None], RolloutAttempt] = {}

    async def claim() -> Record | None:
        claimed = await store.records.claim(
            owner,
            lease_seconds=rollout.lease_seconds,
            admitted_groups=task.order + 1,
            max_attempts=1,
            task_id=fork.id,
        )
        return None if claimed is None else claimed[0]

    try:
        while True:
            record = await claim() if len(running) < max_running else None
            if record is not None:
                attempt = RolloutAttempt(
                    task, record, context, make, counts, on_generated=lambda: None
                )
                renewal.add(attempt)
                running[attempt.start()] = attempt
                continue
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                attempt = running.pop(job)
                renewal.remove(attempt)
                ended = await store.records.get(attempt.record.id)
                assert ended is not None, "records are never removed"
                if ended.status in {*TERMINAL_STATUSES, "finished"}:
                    yield ended
    finally:
        await end_tasks([renewing, *running])
        # No other process continues a fork.
        unfinished = [attempt.record for attempt in running.values()]
        while (pending := await claim()) is not None:
            unfinished.append(pending)
        for record in unfinished:
            with contextlib.suppress(LeaseLost):  # its rollout had ended, and it was being scored
                await store.records.fail_attempt(record.id, record.fence, "interrupted", 1)


def _sampler(
    runs_to_end: bool,
    point: Callable[[], RecordedTurns],
    task: Task,
    record: Record,
    context: RolloutContext,
) -> AsyncSampler[Any]:
    if not (runs_to_end and isinstance(task, MCPTask)):
        return OneReply(task, record, context, point())
    sampler = MCPSampler(task, record, context)
    sampler.play_first(point())
    return sampler

"""One claimed slot from its claim to its score, whatever happens on the way."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.errors import (
    LeaseLost,
    NoServerAvailable,
    ScoringError,
    ServerRefused,
    ServerUnreachable,
    StoreError,
)
from agentrl.rollout.async_sampler import AsyncSampler, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.schema import Record, Task
from agentrl.store import TrajectoryStore

log = logging.getLogger(__name__)

SCORING_RETRY_SECONDS = 10.0
"""How long a Record waits for its next scoring after a scorer could not decide."""

MAX_CLAIMS_PER_ATTEMPT = 3
"""Claims of a slot per attempt of `max_attempts`, after which an absent server counts as well."""

TROUBLE_FAILURES = 3
"""Rollouts that failed in a row after which only one is tried at a time."""
MAX_TROUBLE_PAUSE_SECONDS = 60.0

# `Any`: each sampler takes its own kind of task.
MakeSampler = Callable[[Any, Record, RolloutContext], AsyncSampler[Any]]
CancelReason = Literal["lease_lost", "hand_back", "abandon"]


@dataclass
class Trouble:
    """Failures of the infrastructure since the last rollout that came to its end.

    While rollouts keep failing, few are to be tried: every failure costs its slot an attempt.
    """

    num_failures: int = 0
    began_at: float = 0.0
    last_at: float = 0.0

    def add(self) -> None:
        """Book a failure."""
        self.last_at = time.monotonic()
        if self.num_failures == 0:
            self.began_at = self.last_at
        self.num_failures += 1

    def clear(self) -> None:
        """Forget the failures: a rollout came to its end."""
        self.num_failures = 0

    @property
    def persists(self) -> bool:
        """Whether several rollouts failed in a row."""
        return self.num_failures >= TROUBLE_FAILURES

    @property
    def retry_at(self) -> float:
        """When to try again: the longer the trouble lasts, the longer the pause."""
        return self.last_at + min(max(self.last_at - self.began_at, 1.0), MAX_TROUBLE_PAUSE_SECONDS)


@dataclass
class SlotCounts:
    """What became of the slots of a process."""

    finished: int = 0
    scored: int = 0
    failed: int = 0
    handed_back: int = 0
    lost: int = 0
    taken_up: int = 0
    """Rollouts that another process had begun."""
    num_output_tokens: int = 0
    branches: Counter[str] = field(default_factory=Counter)
    """Turns whose prompts do not extend their parents in full, by reason (`drift`, ...)."""
    trouble: Trouble = field(default_factory=Trouble)


class Slot:
    """Plays one claimed Record, or scores one that was played before.

    Every way out is a write of its own, fenced by the claim: finished and scored, failed (counted
    as an attempt), handed back (not counted), or, when the lease is gone, nothing at all.
    """

    def __init__(
        self,
        task: Task,
        record: Record,
        context: RolloutContext,
        make_sampler: MakeSampler,
        counts: SlotCounts,
        *,
        on_played: Callable[[], None],
    ) -> None:
        """Prepare; `start` begins.

        Args:
            task: the question.
            record: the claimed slot.
            context: what all rollouts of the process share.
            make_sampler: builds what plays it.
            counts: where its end is booked.
            on_played: called when the rollout asks the servers for nothing more.
        """
        self.task = task
        self.record = record
        self.phase: Literal["running", "scoring"] = "running"
        self.cancel_reason: CancelReason | None = None
        self.is_playing = True
        """The rollout may still ask the servers for something."""
        self._on_played = on_played
        self._context = context
        self._make_sampler = make_sampler
        self._counts = counts
        self._job: asyncio.Task[None] | None = None

    @property
    def lease(self) -> tuple[str, int]:
        """The Record and the fencing token under which it is held."""
        return self.record.id, self.record.fence

    def start(self, *, scoring_only: bool = False) -> asyncio.Task[None]:
        """Begin in the background."""
        self.is_playing = not scoring_only
        work = self._score_again() if scoring_only else self._play()
        self._job = asyncio.create_task(self._guarded(work), name=self.record.id)
        return self._job

    def cancel(self, reason: CancelReason) -> None:
        """End the slot early; what is written then depends on the reason."""
        if self._job is not None and self.cancel_reason is None:
            self.cancel_reason = reason
            self._job.cancel()

    @property
    def _store(self) -> TrajectoryStore:
        return self._context.store

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            await self._write_last(self._after_cancel())
        except Exception as error:  # noqa: BLE001
            # The top of a slot: whatever a user's sampler or scorer raises ends this and no other.
            await self._write_last(self._after_failure(error))

    async def _play(self) -> None:
        sampler = self._make_sampler(self.task, self.record, self._context)
        if self.record.turns:
            sampler.take_up(await self._store.turns.get_many(self.record.turns))
            self._counts.taken_up += 1
        result = await self._roll_out(sampler)
        if self._context.rollout.scoring == "elsewhere":
            await self._store.records.release(*self.lease)
        else:
            await self._score(sampler, result)

    async def _roll_out(self, sampler: AsyncSampler[Any]) -> RolloutResult:
        finished = False
        try:
            result = await sampler.run()
            self.is_playing = False
            self._on_played()
            await sampler.finish()
            lease_seconds = self._context.rollout.lease_seconds
            await self._store.records.finish(
                *self.lease,
                outcome=result.outcome,
                final_answer=result.final_answer,
                lease_seconds=lease_seconds,
            )
            finished = True
        finally:
            if not finished:
                await sampler.discard()
        self.phase = "scoring"
        self._counts.finished += 1
        self._counts.trouble.clear()
        self._counts.num_output_tokens += sum(len(turn.output_ids) for turn in sampler.turns)
        self._counts.branches.update(
            turn.branch_reason for turn in sampler.turns if turn.branch_reason is not None
        )
        return result

    async def _score_again(self) -> None:
        """Score a Record whose rollout ended earlier, perhaps in another process."""
        self.phase = "scoring"
        assert self.record.outcome is not None
        result = RolloutResult(self.record.outcome, self.record.final_answer)
        await self._score(self._make_sampler(self.task, self.record, self._context), result)

    async def _score(self, sampler: AsyncSampler[Any], result: RolloutResult) -> None:
        score = await sampler.evaluate_record(result)
        await self._store.scores.set(*self.lease, score)
        self._counts.scored += 1

    async def _after_cancel(self) -> None:
        if self.cancel_reason != "hand_back":
            # The lease is another's by now, or there is no time left: write nothing.
            self._counts.lost += self.cancel_reason == "lease_lost"
            return
        self._counts.handed_back += 1
        await self._store.records.release(*self.lease)

    async def _after_failure(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        record_id = self.record.id
        if isinstance(error, LeaseLost):
            self._counts.lost += 1
            log.warning("%s: lease lost, nothing more is written", record_id)
        elif self._servers_away(error):
            log.warning("%s: handed back (%s)", record_id, error)
            self._counts.trouble.add()
            self._counts.handed_back += 1
            await self._store.records.release(*self.lease)
        elif self.phase == "scoring":
            unexpected = None if isinstance(error, ScoringError) else error
            log.warning("%s: scoring put off (%s)", record_id, text, exc_info=unexpected)
            await self._store.scores.postpone(*self.lease, text, SCORING_RETRY_SECONDS)
        else:
            self._counts.failed += 1
            self._counts.trouble.add()
            log.warning("%s: attempt %d failed (%s)", record_id, self.record.attempt, text)
            log.debug("%s", record_id, exc_info=error)
            rollout = self._context.rollout
            max_attempts = rollout.max_attempts if rollout.resample_error_records else 1
            await self._store.records.fail_attempt(*self.lease, text, max_attempts)

    def _servers_away(self, error: Exception) -> bool:
        """Whether the attempt is not to count, because no server could be talked to.

        Bounded all the same: a prompt that brings servers down must not go round for ever.
        """
        if len(self.record.attempts) >= MAX_CLAIMS_PER_ATTEMPT * self._context.rollout.max_attempts:
            return False
        if isinstance(error, ServerRefused):
            return error.is_transient
        return isinstance(error, NoServerAvailable | ServerUnreachable)

    async def _write_last(self, write: Coroutine[Any, Any, None]) -> None:
        try:
            await write
        except StoreError as error:
            # The lease runs out by itself, and the slot is claimed again.
            log.warning("%s: left to expire (%s)", self.record.id, error)

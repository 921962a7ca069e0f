"""One attempt at a claimed slot, from its claim to its score, and the renewal of its lease.

Every attempt ends with one write, fenced by the claim: finished and scored, dead-lettered because
the scorer has a defect, failed (counts as an attempt), or released (does not count). Once the lease
is lost, nothing is written.
"""

import asyncio
import logging
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.errors import (
    LeaseLost,
    NoServerAvailable,
    ScorerDefect,
    ServerRefused,
    ServerUnreachable,
    StoreError,
    StoreUnreachable,
)
from agentrl.rewards.scoring_failures import as_number, as_scoring_error
from agentrl.rollout.async_sampler import AsyncSampler, BranchClosed, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.recorded_turns import RecordedTurns
from agentrl.rollout.worker.admission_limits import FailureBackoff
from agentrl.rollout.worker.branching import branch_turns, stored_turns, with_branch
from agentrl.rollout.worker.group_scoring import GroupVerdict
from agentrl.schema import DispatchedSamplingTask, MCPTask, Record, Score, Task
from agentrl.store import TrajectoryStore

log = logging.getLogger(__name__)

SCORING_RETRY_SECONDS = 10.0
"""How long a Record waits before scoring is retried after a scorer could not decide."""

GROUP_SECONDS = 15.0
"""How long a Record waits for the rest of its group before a sampler checks again. The process that
scores the group scores its Records at once; the check covers a process that died or failed.
"""

DEFECT_RETRY_SECONDS = 1.0
"""Delay before a scoring function that raised an error is called a second time."""

_ANSWER_CHARACTERS = 80
"""Longest answer in a log line."""

MAX_CLAIMS_PER_ATTEMPT = 3
"""Claims of a slot per attempt of `max_attempts`; beyond these, a claim that found no server counts
as an attempt as well.
"""

# `Any`, because each sampler class accepts its own kind of task.
MakeSampler = Callable[[Any, Record, RolloutContext], AsyncSampler[Any]]
CancelReason = Literal["lease_lost", "release", "abandon"]


@dataclass
class SlotCounts:
    """Counts a process's slots by outcome."""

    finished: int = 0
    scored: int = 0
    unscorable: int = 0
    """Finished rollouts that a defect of the scorer left without a score."""
    failed: int = 0
    released: int = 0
    lost: int = 0
    resumed: int = 0
    """Rollouts that another process had started."""
    num_output_tokens: int = 0
    branched: Counter[str] = field(default_factory=Counter)
    """Finished rollouts of later rounds, by the rule that chose their turn (`none`: the question)."""
    closed_branches: int = 0
    """Branches at which the state of the tools could not be restored."""
    branches: Counter[str] = field(default_factory=Counter)
    """Turns whose prompts do not extend their parents in full, by reason (`drift`, ...)."""
    defects: Counter[str] = field(default_factory=Counter)
    """The unscorable rollouts, by `ScorerDefect.kind`."""
    backoff: FailureBackoff = field(default_factory=FailureBackoff)


class RolloutAttempt:
    """Runs the rollout of one claimed slot and scores it, or scores a rollout that ended earlier."""

    def __init__(
        self,
        task: Task,
        record: Record,
        context: RolloutContext,
        make_sampler: MakeSampler,
        counts: SlotCounts,
        *,
        on_generated: Callable[[], None],
    ) -> None:
        self.task = task
        self.record = record
        self.phase: Literal["running", "scoring"] = "running"
        self.cancel_reason: CancelReason | None = None
        self.needs_servers = True
        """Whether the rollout may still send requests to the servers."""
        self._on_generated = on_generated
        self._context = context
        self._make_sampler = make_sampler
        self._counts = counts
        self._job: asyncio.Task[None] | None = None
        self._has_started = False

    @property
    def lease(self) -> tuple[str, int]:
        """The Record's id and the fencing token of the claim."""
        return self.record.id, self.record.fence

    def start(self, *, scoring_only: bool = False) -> asyncio.Task[None]:
        """Start in the background; the returned task raises only if it is cancelled."""
        self.needs_servers = not scoring_only
        work = self._score_again if scoring_only else self._run
        self._job = asyncio.create_task(self._guarded(work), name=self.record.id)
        return self._job

    def cancel(self, reason: CancelReason) -> None:
        """End the attempt early; the reason determines what is written."""
        if self._job is not None and self.cancel_reason is None:
            self.cancel_reason = reason
            # A task that is cancelled before its first step never runs, not even to release the
            # slot.
            if self._has_started:
                self._job.cancel()

    @property
    def _store(self) -> TrajectoryStore:
        return self._context.store

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        self._has_started = True
        try:
            if self.cancel_reason is not None:
                raise asyncio.CancelledError
            await work()
        except asyncio.CancelledError:
            await self._try_write(self._after_cancel())
        except Exception as error:  # noqa: BLE001
            # Outermost handler of an attempt: an error in a user's rollout or scorer ends this
            # attempt only.
            await self._try_write(self._after_failure(error))

    async def _run(self) -> None:
        if self.record.round:
            self.record = await with_branch(self._context, self.record)
        sampler = self._make_sampler(self.task, self.record, self._context)
        turns: list[DispatchedSamplingTask] = []
        if self.record.turns:
            turns = await self._store.turns.get_many(self.record.turns)
            self._counts.resumed += 1
        if self.record.branch is not None:
            sampler.play_first(await branch_turns(self._context, sampler, turns))
        elif self.task.start is not None:
            sampler.play_first(stored_turns(self._context, sampler, self.task.start, turns))
        elif turns:
            sampler.play_first(RecordedTurns.of_attempt(turns))
        result = await self._run_rollout(sampler)
        if self._context.rollout.scoring == "elsewhere":
            await self._store.records.release(*self.lease)
        else:
            await self._score(sampler, result)

    async def _run_rollout(self, sampler: AsyncSampler[Any]) -> RolloutResult:
        finished = False
        try:
            result = await sampler.run()
            self.needs_servers = False
            self._on_generated()
            await sampler.finish()
            await self._store.records.finish(
                *self.lease,
                outcome=result.outcome,
                final_answer=result.final_answer,
                reward=result.reward,
                metrics=result.metrics,
                lease_seconds=self._context.rollout.lease_seconds,
            )
            finished = True
        finally:
            if not finished:
                await sampler.discard()
        self.phase = "scoring"
        self._counts.finished += 1
        self._counts.backoff.clear()
        point = self.record.branch
        start = point or self.task.start
        first_sampled = 0 if start is None else start.turn
        if self.record.round:
            self._counts.branched["none" if point is None else point.rule] += 1
        self._counts.num_output_tokens += sum(
            len(turn.output_ids) for turn in sampler.turns[first_sampled:]
        )
        self._counts.branches.update(
            turn.branch_reason for turn in sampler.turns if turn.branch_reason is not None
        )
        return result

    async def _score_again(self) -> None:
        """Score a Record whose rollout ended earlier, perhaps in another process."""
        self.phase = "scoring"
        record = self.record
        assert record.outcome is not None
        result = RolloutResult(record.outcome, record.final_answer, record.reward, record.metrics)
        await self._score(self._make_sampler(self.task, self.record, self._context), result)

    async def _score(self, sampler: AsyncSampler[Any], result: RolloutResult) -> None:
        group = GroupVerdict.of(self._context, self.task)
        try:
            score = await self._evaluate(sampler, result, group)
        except ScorerDefect as defect:
            await self._dead_letter(result, defect)
            return
        if score is None:
            await self._store.scores.postpone(*self.lease, None, GROUP_SECONDS)
        else:
            await self._store.scores.set(*self.lease, score)
            self._counts.scored += 1
        if group is not None:
            # `+= await` would lose what other attempts add to the counter meanwhile.
            num_scored = await group.score_waiting()
            self._counts.scored += num_scored

    async def _evaluate(
        self, sampler: AsyncSampler[Any], result: RolloutResult, group: GroupVerdict | None
    ) -> Score | None:
        """Return the score; None while a task whose Records are scored together waits for others."""
        seen_kinds: set[str] = set()
        while True:
            try:
                if group is not None:
                    return await group.score_of(self.record)
                found = await sampler.evaluate_record(result)
                if isinstance(found, Score):
                    return found
                value = as_number(found, "evaluate_record")
                return Score(scorer=type(sampler).__name__, value=value)
            except Exception as error:
                failure = as_scoring_error(error, "evaluate_record")
                if isinstance(failure, ScorerDefect) and not (
                    failure.is_certain or failure.kind in seen_kinds
                ):
                    seen_kinds.add(failure.kind)
                    log.debug("%s", self.record.id, exc_info=error)
                elif failure is error:
                    raise
                else:
                    raise failure from error
            await asyncio.sleep(DEFECT_RETRY_SECONDS)

    async def _dead_letter(self, result: RolloutResult, defect: ScorerDefect) -> None:
        """Leave the Record without a score; the group continues without it."""
        self._counts.unscorable += 1
        self._counts.defects[defect.kind] += 1
        if self._counts.defects[defect.kind] == 1:
            log.warning(
                "%s: %s; the answer was %r. The group continues without this record; fix the "
                "scorer, then score the record with `agentrl store rescore --scorer %s` (logged "
                "once)",
                self.record.id,
                defect,
                textwrap.shorten(str(result.final_answer), _ANSWER_CHARACTERS, placeholder="..."),
                self._context.scorer_of(self.task) if isinstance(self.task, MCPTask) else "NAME",
            )
        await self._store.scores.fail(*self.lease, str(defect))

    async def _after_cancel(self) -> None:
        if self.cancel_reason != "release":
            # The lease belongs to another process, or no time is left: write nothing.
            self._counts.lost += self.cancel_reason == "lease_lost"
            return
        self._counts.released += 1
        await self._store.records.release(*self.lease)

    async def _after_failure(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        record_id = self.record.id
        if isinstance(error, LeaseLost):
            self._counts.lost += 1
            log.warning("%s: lease lost, no further writes", record_id)
        elif isinstance(error, BranchClosed) and self.record.branch is not None:
            await self._close_branch(str(error))
        elif self._is_outage(error):
            log.warning("%s: released (%s)", record_id, error)
            self._counts.backoff.add()
            self._counts.released += 1
            await self._store.records.release(*self.lease)
        elif self.phase == "scoring":
            log.warning("%s: scoring postponed (%s)", record_id, text)
            await self._store.scores.postpone(*self.lease, text, SCORING_RETRY_SECONDS)
        else:
            self._counts.failed += 1
            self._counts.backoff.add()
            log.warning("%s: attempt %d failed (%s)", record_id, self.record.attempt, text)
            log.debug("%s", record_id, exc_info=error)
            rollout = self._context.rollout
            max_attempts = rollout.max_attempts if rollout.resample_error_records else 1
            await self._store.records.fail_attempt(*self.lease, text, max_attempts)

    async def _close_branch(self, reason: str) -> None:
        """Return the slot, whose next attempt starts at the question; this is no failure."""
        self._counts.released += 1
        self._counts.closed_branches += 1
        if self._counts.closed_branches == 1:
            log.warning(
                "%s: its branch is closed and it starts at the question, because the tools cannot "
                "be brought to the same state (logged once): %s",
                self.record.id,
                reason,
            )
        await self._store.records.close_branch(*self.lease, reason)

    def _is_outage(self, error: Exception) -> bool:
        """Return whether no server or database could be reached; such an attempt does not count.

        The number of such claims is limited: a prompt that crashes servers must not circulate
        forever.
        """
        if len(self.record.attempts) >= MAX_CLAIMS_PER_ATTEMPT * self._context.rollout.max_attempts:
            return False
        if isinstance(error, ServerRefused):
            return error.is_transient
        return isinstance(error, NoServerAvailable | ServerUnreachable | StoreUnreachable)

    async def _try_write(self, write: Coroutine[Any, Any, None]) -> None:
        try:
            await write
        except StoreError as error:
            # The lease will expire, and the slot is claimed again.
            log.warning("%s: leaving the lease to expire (%s)", self.record.id, error)


class LeaseRenewal:
    """Renews the leases of all attempts of a process with one write per interval.

    Args:
        store: the trajectory store.
        lease_seconds: how long a heartbeat holds a lease; three are sent in that time.
    """

    def __init__(self, store: TrajectoryStore, lease_seconds: float) -> None:
        self._store = store
        self._lease_seconds = lease_seconds
        self._attempts: dict[str, RolloutAttempt] = {}

    def add(self, attempt: RolloutAttempt) -> None:
        """Renew this attempt's lease from now on."""
        self._attempts[attempt.record.id] = attempt

    def remove(self, attempt: RolloutAttempt) -> None:
        """Stop renewing this attempt's lease."""
        if self._attempts.get(attempt.record.id) is attempt:
            del self._attempts[attempt.record.id]

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            try:
                await self.renew()
            except StoreError as error:
                # Fencing makes a late holder harmless, so the rollouts continue during the outage.
                log.warning("heartbeat failed, retrying: %s", error)

    async def renew(self) -> None:
        """Renew all leases at once, and cancel the attempts that have lost theirs."""
        held = dict(self._attempts)
        if not held:
            return
        leases = [attempt.lease for attempt in held.values()]
        for record_id in await self._store.records.renew(leases, self._lease_seconds):
            # An attempt that ended during the heartbeat has no lease to lose.
            attempt = held[record_id]
            if self._attempts.get(record_id) is attempt:
                log.warning("%s: lease lost, stopping its rollout", record_id)
                attempt.cancel("lease_lost")

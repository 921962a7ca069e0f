"""Random histories of several samplers and scorers, checked against the rules after every step."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.stored import make_task, make_turn, wrong_counts

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import RECORD_TRANSITIONS, Record, RecordStatus, Score
from agentrl.store import TrajectoryStore

MAX_ATTEMPTS = 3
NUM_TASKS, NUM_GENERATIONS = 2, 2
WHO = st.integers(0, 2)


@dataclass
class Process:
    """What one process believes it holds; it may be wrong, as a process that slept is."""

    name: str
    record: Record | None = None
    num_turns: int = 0

    @property
    def lease(self) -> tuple[str, int]:
        assert self.record is not None
        return self.record.id, self.record.fence


class Lifecycle(RuleBasedStateMachine):
    """Processes that act in any order on one store."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.resources = AsyncExitStack()
        self.store: TrajectoryStore = self.do(
            self.resources.enter_async_context(TrajectoryStore.connect(uri))
        )
        self.processes = [Process(f"p{number}") for number in range(3)]
        self.acknowledged: dict[str, tuple[str, int]] = {}
        """Turn id -> record id and attempt of every turn whose append returned."""
        self.statuses: dict[str, RecordStatus] = {}
        self.unrepaired: set[str] = set()
        """Groups whose last holder died before it completed them; a reaper will."""

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @initialize()
    def add_tasks(self) -> None:
        self.do(
            self.store.tasks.add(
                make_task(number, num_generations=NUM_GENERATIONS) for number in range(NUM_TASKS)
            )
        )

    def teardown(self) -> None:
        self.do(self.store.drop_database())
        self.do(self.resources.aclose())
        self.runner.close()

    # --- what processes do ---------------------------------------------------------------------

    @rule(who=WHO, resumable=st.booleans())
    def claim(self, who: int, resumable: bool) -> None:
        process = self.processes[who]
        claimed = self.do(
            self.store.records.claim(
                process.name,
                lease_seconds=600,
                admitted_groups=99,
                max_attempts=MAX_ATTEMPTS,
                resumable=resumable,
            )
        )
        if claimed is not None:
            process.record, process.num_turns = claimed[0], len(claimed[0].turns)

    @rule(who=WHO)
    def claim_scoring(self, who: int) -> None:
        claimed = self.do(self.store.scores.claim(self.processes[who].name, 600))
        if claimed is not None:
            self.processes[who].record = claimed[0]

    @rule(who=WHO)
    def append_turn(self, who: int) -> None:
        process = self.processes[who]
        if process.record is None:
            return
        turn = make_turn(process.record, process.num_turns)
        if self.write(process, self.store.turns.append(turn, process.record.fence)):
            self.acknowledged[turn.id] = (turn.record_id, turn.attempt)
            process.num_turns += 1

    @rule(who=WHO)
    def finish(self, who: int) -> None:
        process = self.processes[who]
        if process.record is not None:
            ending = self.store.records.finish(
                *process.lease, outcome="answered", final_answer="4", lease_seconds=600
            )
            self.write(process, ending)

    @rule(who=WHO, dies=st.booleans())
    def score(self, who: int, dies: bool) -> None:
        process = self.processes[who]
        if process.record is None:
            return
        score = Score(scorer=process.name, value=1.0)
        with patch.object(self.store.groups, "complete", _nothing) if dies else nullcontext():
            scored = self.write(process, self.store.scores.set(*process.lease, score))
        if dies:
            self.unrepaired |= {process.record.task_id} if scored else set()

    @rule(who=WHO)
    def give_scoring_up(self, who: int) -> None:
        process = self.processes[who]
        if process.record is not None and self.read(process.record.id).status != "running":
            self.write(process, self.store.scores.fail(*process.lease, "a defect"))

    @rule()
    def repair_a_scoring(self) -> None:
        for record in self.do(self._records()):
            if record.status == "failed":
                with suppress(StoreError):
                    self.do(self.store.scores.repair(record.id, Score(scorer="s", value=0.5)))

    @rule(who=WHO)
    def put_scoring_off(self, who: int) -> None:
        process = self.processes[who]
        if process.record is not None:
            self.write(process, self.store.scores.postpone(*process.lease, "judge is out", 0))

    @rule(who=WHO)
    def release(self, who: int) -> None:
        process = self.processes[who]
        if process.record is not None:
            self.write(process, self.store.records.release(*process.lease))

    @rule(who=WHO)
    def fail(self, who: int) -> None:
        process = self.processes[who]
        if process.record is not None:
            failing = self.store.records.fail_attempt(*process.lease, "no server", MAX_ATTEMPTS)
            self.write(process, failing)

    @rule(who=WHO)
    def heartbeat(self, who: int) -> None:
        process = self.processes[who]
        if process.record is None:
            return
        before = self.read(process.record.id)
        lost = self.do(self.store.records.renew([process.lease], 600))
        given_up = before.status in ("pending", "failed")
        assert (lost == set()) == (before.fence == process.record.fence and not given_up)
        after = self.read(process.record.id)
        assert after.model_copy(update={"lease": None}) == before.model_copy(update={"lease": None})

    @rule(who=WHO)
    def fall_silent(self, who: int) -> None:
        expired = [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}]
        owned = {"lease.owner": self.processes[who].name}
        self.do(self.store.database["records"].update_many(owned, expired))

    @rule()
    def reap(self) -> None:
        self.do(self.store.groups.reap(MAX_ATTEMPTS, lease_seconds=600))
        self.unrepaired.clear()
        assert self.do(wrong_counts(self.store)) == []

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def read_an_old_attempt(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.acknowledged)))
        turns = self.do(self.store.turns.of_record(*self.acknowledged[turn_id]))
        assert turn_id in [turn.id for turn in turns]
        assert [turn.index for turn in turns] == list(range(len(turns)))

    def write(self, process: Process, writing: Coroutine[Any, Any, Any]) -> bool:
        """Write as the holder; return whether it was taken. A stale holder changes nothing."""
        assert process.record is not None
        before = self.read(process.record.id)
        try:
            self.do(writing)
        except LeaseLost:
            assert self.read(process.record.id) == before
            return False
        if before.fence != process.record.fence:
            assert self.read(process.record.id) == before
        return True

    def read(self, record_id: str) -> Record:
        record: Record = self.do(self.store.records.get(record_id))
        return record

    # --- what holds at every moment --------------------------------------------------------------

    @invariant()
    def records_are_in_order(self) -> None:
        for record in self.do(self._records()):
            self._moved_legally(record)
            counted = sum(a.ended_by in ("expired", "error") for a in record.attempts)
            assert counted <= MAX_ATTEMPTS
            gave_up = record.status == "failed" and record.outcome is not None
            assert (record.status == "failed" and not gave_up) == (counted == MAX_ATTEMPTS)
            assert (record.status == "scored") == (record.score is not None)
            assert (record.lease is not None) == (record.status in ("running", "finished"))
            assert all(self.acknowledged[turn_id][0] == record.id for turn_id in record.turns)
            numbers = [attempt.attempt for attempt in record.attempts]
            fences = [attempt.fence for attempt in record.attempts]
            assert fences == sorted(set(fences))
            assert sorted(set(numbers)) == list(range(1, record.attempt + 1))
            assert numbers == sorted(numbers)
            assert all(attempt.ended_at is not None for attempt in record.attempts[:-1])
            for earlier, later in zip(record.attempts, record.attempts[1:], strict=False):
                if earlier.attempt == later.attempt:
                    assert later.first_turn >= earlier.first_turn
                    assert later.first_turn > 0

    @invariant()
    def what_was_acknowledged_is_there_and_nothing_else(self) -> None:
        stored = self.do(self.store.database["turns"].distinct("_id"))
        assert set(stored) == set(self.acknowledged)

    @invariant()
    def groups_complete_with_their_last_record(self) -> None:
        records = self.do(self._records())
        open_groups = {r.task_id for r in records if r.status not in ("scored", "failed")}
        ended = {r.task_id for r in records} - open_groups
        tasks = self.do(self._tasks())
        completed = {task.id for task in tasks if task.status == "completed"}
        assert ended - self.unrepaired <= completed <= ended
        groups = self.do(self.store.ledger.ready_groups(limit=99, hydrate=False))
        assert {data.task_id for group in groups for data in group} == completed
        assert all(len(group) == NUM_GENERATIONS for group in groups)

    def _moved_legally(self, record: Record) -> None:
        before = self.statuses.get(record.id, "pending")
        reachable = {before} | RECORD_TRANSITIONS[before]
        if before == "pending" or "pending" in reachable:
            reachable |= {"running"}  # reaped and claimed again by one call
        assert record.status in reachable
        self.statuses[record.id] = record.status

    async def _records(self) -> list[Record]:
        return [record async for record in self.store.records.find()]

    async def _tasks(self) -> list[Any]:
        return [task async for task in self.store.tasks.find()]


async def _nothing(task_ids: object) -> set[str]:
    return set()


def play(uri: str, *, examples: int, steps: int) -> None:
    class Connected(Lifecycle):
        def __init__(self) -> None:
            super().__init__(uri)

    run_state_machine_as_test(
        Connected,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_history_of_processes_breaks_the_rules(mongo_uri: str) -> None:
    play(mongo_uri, examples=10, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_history_out_of_many_breaks_the_rules(mongo_uri: str) -> None:
    play(mongo_uri, examples=200, steps=60)

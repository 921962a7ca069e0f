"""Random histories of several samplers, checked against a model of the rules."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stored import make_task, make_turn

from agentrl.errors import LeaseLost
from agentrl.schema import Record, Score
from agentrl.store import TrajectoryStore

MAX_ATTEMPTS = 2
NUM_TASKS, NUM_GENERATIONS = 1, 2
ACTIONS = (
    "claim",
    "claim",
    "turn",
    "finish",
    "score",
    "put_off",
    "release",
    "fail",
    "silence",
    "reap",
)


@dataclass
class Sampler:
    """What one process believes it holds; it may be wrong, as a process that slept is."""

    name: str
    record: Record | None = None
    finished: bool = False
    num_turns: int = 0


@dataclass
class History:
    """Samplers that act in any order on one store."""

    store: TrajectoryStore
    samplers: list[Sampler] = field(default_factory=lambda: [Sampler(f"s{n}") for n in range(3)])
    acknowledged: dict[str, str] = field(default_factory=dict)
    """Turn id -> record id of every turn whose append returned."""

    async def act(self, action: str, number: int) -> None:
        sampler = self.samplers[number]
        if action == "reap":
            await self.store.reap(MAX_ATTEMPTS)
        elif action == "silence":
            await self.store._records.update_many(
                {"lease.owner": sampler.name},
                [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}],
            )
        elif action == "claim":
            await self._claim(sampler)
        elif sampler.record is not None:
            await self._try_to_write(action, sampler, sampler.record)
        await self.check()

    async def _claim(self, sampler: Sampler) -> None:
        if sampler.record is not None and sampler.num_turns % 2:
            return  # goes on believing in what it holds
        scoring = await self.store.claim_scoring(sampler.name, 600)
        if scoring is not None:
            sampler.record, sampler.finished = scoring[0], True
            return
        claimed = await self.store.claim_record(
            sampler.name, lease_seconds=600, admitted_groups=99, max_attempts=MAX_ATTEMPTS
        )
        if claimed is not None:
            sampler.record, sampler.finished, sampler.num_turns = claimed[0], False, 0

    async def _try_to_write(self, action: str, sampler: Sampler, record: Record) -> None:
        before = await self.store.record(record.id)
        assert before is not None
        try:
            await self._write(action, sampler, record)
        except LeaseLost:
            assert await self.store.record(record.id) == before
        else:
            # A record that others claimed since is out of reach (doing nothing is fine).
            if before.fence != record.fence:
                assert await self.store.record(record.id) == before

    async def _write(self, action: str, sampler: Sampler, record: Record) -> None:
        key = (record.id, record.fence)
        if action == "turn" and not sampler.finished:
            turn = make_turn(record, sampler.num_turns)
            await self.store.append_turn(turn, record.fence)
            self.acknowledged[turn.id] = record.id
            sampler.num_turns += 1
        elif action == "finish" and not sampler.finished:
            await self.store.finish_rollout(
                *key, outcome="answered", final_answer="4", lease_seconds=600
            )
            sampler.finished = True
        elif action == "score":
            await self.store.set_score(*key, Score(scorer=sampler.name, value=1.0))
        elif action == "put_off":
            await self.store.put_off_scoring(*key, "judge is out", 0)
        elif action == "release":
            await self.store.release(*key)
        elif action == "fail":
            await self.store.fail_attempt(*key, "no server", MAX_ATTEMPTS)

    async def check(self) -> None:
        """The invariants that hold at every moment."""
        records = [record async for record in self.store.iter_records()]
        assert len(records) == NUM_TASKS * NUM_GENERATIONS
        for record in records:
            counted = sum(a.ended_by in ("expired", "error") for a in record.attempts)
            assert counted <= MAX_ATTEMPTS
            assert (record.status == "failed") == (counted == MAX_ATTEMPTS)
            assert (record.status == "scored") == (record.score is not None)
            assert record.attempt == len(record.attempts)
            assert all(a.ended_at is not None for a in record.attempts[:-1])
            assert (record.lease is not None) == (record.status in ("running", "finished"))
        stored = {d["_id"] async for d in self.store._turns.find({}, {"_id": 1})}
        assert stored == set(self.acknowledged), "exactly the acknowledged turns are there"
        ended = {r.task_id for r in records} - {
            r.task_id for r in records if r.status not in ("scored", "failed")
        }
        completed = {t.id async for t in self.store.iter_tasks() if t.status == "completed"}
        assert completed == ended
        groups = await self.store.ready_groups(limit=99)
        assert {data.task_id for group in groups for data in group} == ended
        assert all(len(group) == NUM_GENERATIONS for group in groups)


@pytest.mark.timeout(90)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), min_size=15, max_size=40))
def test_no_history_of_samplers_breaks_the_rules(
    mongo_uri: str, history: list[tuple[str, int]]
) -> None:
    asyncio.run(_replay(mongo_uri, history))


async def _replay(uri: str, history: list[tuple[str, int]]) -> None:
    async with TrajectoryStore.connect(uri) as store:
        await store.add_tasks(
            make_task(number, num_generations=NUM_GENERATIONS) for number in range(NUM_TASKS)
        )
        played = History(store)
        for action, number in history:
            await played.act(action, number)
        await store.drop_database()

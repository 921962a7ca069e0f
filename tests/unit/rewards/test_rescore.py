"""Scores that are computed later stand beside those that the samplers gave."""

from collections.abc import Iterator, Sequence

import pytest
from support.stored import claim, fill, make_task, play

from agentrl.errors import ScoringError, StoreError
from agentrl.rewards import GroundTruth, MCPScorerFactory
from agentrl.rewards.rescore import rescore
from agentrl.schema import Record, Score
from agentrl.store import TrajectoryStore


@pytest.fixture(autouse=True)
def _same_scorers_afterwards() -> Iterator[None]:
    before = dict(MCPScorerFactory._scorers)
    yield
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


def register(version: str, value: float, *, undecided: str = "") -> None:
    def judge(answer: str, truth: GroundTruth) -> float:
        if str(truth.answer) == undecided:
            raise ScoringError("no verdict")
        return value

    MCPScorerFactory.register_scorer("strict", judge, version=version)


async def test_a_new_version_stands_beside_the_others_and_nothing_is_sampled(
    store: TrajectoryStore,
) -> None:
    ids = await fill(store, 3)
    num_turns = await store.database["turns"].count_documents({})
    register("1", 0.25)
    counts = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (counts.num_scored, counts.num_known) == (6, 0)
    register("2", 0.75)
    await rescore(store, MCPScorerFactory.get_scorer("strict"))
    again = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (again.num_scored, again.num_known) == (0, 6)
    for group in await store.ledger.ready_groups(limit=10):
        for data in group:
            record = await store.records.get(data.record_id)
            assert record is not None
            assert data.more_scores == record.more_scores
            assert record.score == data.score
            assert data.score is not None
            assert data.score.scorer == "exact"
            found = [(s.version, s.value, s.inputs["answer"]) for s in record.more_scores]
            assert found == [("1", 0.25, "4"), ("2", 0.75, "4")]
            newest, named = record.score_of("strict"), record.score_of("strict", "1")
            assert newest is not None
            assert named is not None
            assert (newest.value, named.value) == (0.75, 0.25)
    assert await store.database["turns"].count_documents({}) == num_turns
    assert len(ids) == 6


async def test_what_cannot_be_decided_stays_without_and_is_tried_again(
    store: TrajectoryStore,
) -> None:
    await fill(store, 2)
    register("1", 1.0, undecided="0")
    counts = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (counts.num_scored, counts.num_undecided) == (2, 2)
    assert counts.reasons[0].startswith("train/0/q0/")
    register("1", 1.0)
    assert (await rescore(store, MCPScorerFactory.get_scorer("strict"))).num_scored == 2


async def test_groups_that_are_still_sampled_are_left_for_later(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await play(store, await claim(store))
    register("1", 1.0)
    assert (await rescore(store, MCPScorerFactory.get_scorer("strict"))).num_open == 1
    with pytest.raises(StoreError, match="is incomplete"):
        await store.scores.add(record.id, Score(scorer="strict", value=1.0))
    await play(store, await claim(store))
    assert (await rescore(store, MCPScorerFactory.get_scorer("strict"))).num_scored == 2


async def test_records_whose_scorer_was_defective_are_repaired_and_count(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0).model_copy(update={"scorer": "strict"})])
    first = await play(store, await claim(store), score=None)
    await store.scores.fail(first.id, first.fence, "scorer 'strict' failed: ValueError: x (s.py:3)")
    register("1", 0.5)
    counts = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (counts.num_repaired, counts.num_open) == (0, 1)
    await play(store, await claim(store))
    register("1", 0.5, undecided="0")
    assert (await rescore(store, MCPScorerFactory.get_scorer("strict"))).num_repaired == 0
    register("1", 0.5)
    counts = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (counts.num_repaired, counts.num_scored) == (1, 1)
    record = await store.records.get(first.id)
    assert record is not None
    assert record.score is not None
    assert (record.status, record.error, record.score.value) == ("scored", None, 0.5)
    (group,) = await store.ledger.ready_groups(limit=1)
    assert [data.score and data.score.value for data in group] == [0.5, 1.0]
    again = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (again.num_repaired, again.num_known) == (0, 2)


async def test_every_repair_is_counted(store: TrajectoryStore) -> None:
    task = make_task(0, num_generations=6).model_copy(update={"scorer": "strict"})
    await store.tasks.add([task])
    for _ in range(6):
        record = await play(store, await claim(store), score=None)
        await store.scores.fail(record.id, record.fence, "scorer 'strict' failed")
    register("1", 0.5)
    assert (await rescore(store, MCPScorerFactory.get_scorer("strict"))).num_repaired == 6


async def test_a_record_that_failed_in_its_rollout_is_not_given_a_score(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=1).model_copy(update={"scorer": "strict"})])
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "tools are away", 1)
    register("1", 0.5)
    counts = await rescore(store, MCPScorerFactory.get_scorer("strict"))
    assert (counts.num_repaired, counts.num_scored) == (0, 0)
    with pytest.raises(StoreError, match="nothing to score"):
        await store.scores.repair(record.id, Score(scorer="strict", value=1.0))


async def test_a_scorer_that_sees_the_group_is_asked_once_a_group(store: TrajectoryStore) -> None:
    await fill(store, 3)
    asked = []

    def ranks(records: Sequence[Record], truth: GroundTruth) -> list[float]:
        asked.append(truth.answer)
        return [float(record.traj_id) for record in records]

    MCPScorerFactory.register_scorer("ranks", ranks, sees_group=True)
    counts = await rescore(store, MCPScorerFactory.get_scorer("ranks"))
    assert (counts.num_scored, sorted(asked)) == (6, [0, 1, 2])
    async for record in store.records.find(status="scored"):
        found = record.score_of("ranks")
        assert found is not None
        assert found.value == record.traj_id
    again = await rescore(store, MCPScorerFactory.get_scorer("ranks"))
    assert (again.num_scored, again.num_known, len(asked)) == (0, 6, 3)

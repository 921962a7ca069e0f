"""Tries that are judged together: once, when the last one has ended, whatever fails in between."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import pytest
from harness.scripted_engine import serve_script
from support.play import begin_run, open_play
from support.stored import claim, play

from agentrl.config.sections import RolloutSection
from agentrl.errors import ScoringError
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import GroundTruth, MCPScorerFactory, RegisteredScoring, Verdict
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.worker.group_scoring import GroupVerdict
from agentrl.rollout.worker.sampling_loop import LoopTimes, SamplingLoop
from agentrl.schema import MCPTask, Record
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q", num_generations=4, query="Name a colour.", scorer="rare")
TIMES = LoopTimes(busy_refresh=0.05, idle_poll=0.05, scoring=0.1, scoring_grace=1.0)


@pytest.fixture(autouse=True)
def asked() -> Iterator[list[int]]:
    """Register a scorer of whole groups; yields how many tries it saw at each call."""
    before, calls = dict(MCPScorerFactory._scorers), list[int]()

    @MCPScorerFactory.register_scorer("rare", sees_group=True)
    def rare(records: Sequence[Record], truth: GroundTruth) -> list[Verdict]:
        calls.append(len(records))
        answers = [record.final_answer for record in records]
        shares = [answers.count(answer) / len(answers) for answer in answers]
        return [Verdict(1 - share, parts={"share": share}) for share in shares]

    yield calls
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


async def test_tries_are_judged_together_and_the_group_completes(
    store: TrajectoryStore, renderer: Renderer, asked: list[int]
) -> None:
    said = itertools.cycle(["red", "red", "red", "blue"])
    rollout = RolloutSection(exit_when_done=True, max_concurrent_samples_per_process=2)
    with serve_script(renderer, lambda _: f"<answer>{next(said)}</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_play(
            store, engine, None, rollout=rollout, scoring=RegisteredScoring()
        ) as context:
            loop = SamplingLoop(context, "tester", MCPSampler, times=TIMES)
            await asyncio.wait_for(loop.run(asyncio.Event(), asyncio.Event()), 60)
    # Two tries that end at the same moment may both ask; the first verdict holds for all.
    assert set(asked) == {4}
    assert loop.counts.finished == 4
    (group,) = await store.ledger.ready_groups("trainer", split="train", limit=10, step=1)
    assert len(group) == 4
    found = {}
    for data in group:
        record = await store.records.get(data.record_id)
        assert record is not None
        assert record.score is not None
        assert data.score == record.score
        assert (record.status, record.score.scorer, record.error) == ("scored", "rare", None)
        found[record.final_answer] = (record.score.value, record.score.parts)
    assert found == {"red": (0.25, {"share": 0.75}), "blue": (0.75, {"share": 0.25})}


async def context_of(store: TrajectoryStore, renderer: Renderer) -> RolloutContext:
    with serve_script(renderer, lambda _: "") as engine:
        async with open_play(store, engine, None, scoring=RegisteredScoring()) as context:
            return context


async def finished(store: TrajectoryStore) -> Record:
    return await play(store, await claim(store), score=None)


async def added(store: TrajectoryStore, num_generations: int) -> MCPTask:
    task = TASK.model_copy(update={"num_generations": num_generations})
    await store.tasks.add([task])
    return task


async def test_nobody_judges_before_the_last_try_has_ended(
    store: TrajectoryStore, renderer: Renderer, asked: list[int]
) -> None:
    context = await context_of(store, renderer)
    task = await added(store, 2)
    first = await finished(store)
    assert await GroupVerdict(context, task).score_of(first) is None
    await store.scores.postpone(first.id, first.fence, None, 60)
    assert not asked
    second = await finished(store)
    verdict = GroupVerdict(context, task)
    score = await verdict.score_of(second)
    assert score is not None
    await store.scores.set(second.id, second.fence, score)
    assert await verdict.score_waiting() == 1
    done = await store.tasks.get(task.id)
    assert done is not None
    assert done.status == "completed"


async def test_of_two_processes_that_judge_at_once_the_first_ones_verdict_counts_for_all(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    numbers = itertools.count()
    MCPScorerFactory.register_scorer(
        "rare", lambda records, truth: [next(numbers)] * len(records), sees_group=True
    )
    context = await context_of(store, renderer)
    task = await added(store, 2)
    records = [await finished(store) for _ in range(2)]
    # The first process dies after its verdict; the second had read the group before.
    await GroupVerdict(context, task).score_of(records[0])
    other = await context.scoring.score_group(task, records)
    assert [score.value for score in other] == [1.0, 1.0]
    decided = await store.scores.decide_group(task.id, dict(enumerate(other)))
    assert {score.value for score in decided.values()} == {0.0}
    late = await GroupVerdict(context, task).score_of(records[1])
    assert late is not None
    assert late.value == 0.0
    assert not await store.scores.set_waiting(records[1].id, late), "somebody holds it"


async def test_a_try_that_was_held_when_its_group_was_decided_is_scored_once_it_waits(
    store: TrajectoryStore, renderer: Renderer, asked: list[int]
) -> None:
    context = await context_of(store, renderer)
    task = await added(store, 2)
    first = await finished(store)
    verdict = GroupVerdict(context, task)
    assert await verdict.score_of(first) is None
    second = await finished(store)
    other = GroupVerdict(context, task)
    score = await other.score_of(second)
    assert score is not None
    await store.scores.set(second.id, second.fence, score)
    assert await other.score_waiting() == 0, "the first is still held"
    await store.scores.postpone(first.id, first.fence, None, 60)
    assert await verdict.score_waiting() == 1
    assert asked == [2]


async def test_a_try_that_the_infrastructure_failed_is_not_waited_for(
    store: TrajectoryStore, renderer: Renderer, asked: list[int]
) -> None:
    context = await context_of(store, renderer)
    task = await added(store, 3)
    failed = await claim(store)
    await store.records.fail_attempt(failed.id, failed.fence, "no server", 1)
    records = [await finished(store) for _ in range(2)]
    assert await GroupVerdict(context, task).score_of(records[1]) is not None
    assert asked == [2]


async def test_a_judge_outage_leaves_the_whole_group_unscored(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    def away(records: Sequence[Record], truth: GroundTruth) -> list[float]:
        raise ConnectionError("the judge is away")

    MCPScorerFactory.register_scorer("rare", away, sees_group=True)
    context = await context_of(store, renderer)
    task = await added(store, 1)
    record = await finished(store)
    with pytest.raises(ScoringError, match="the judge is away"):
        await GroupVerdict(context, task).score_of(record)
    assert not await store.scores.of_group(task.id)

"""What people read: stories, lineage both ways, failures, runs."""

from datetime import timedelta

import numpy as np
import pytest
from support.stored import claim, fill, make_task, make_turn, play, read_back

from agentrl.errors import StoreError
from agentrl.schema import (
    InferenceService,
    Policy,
    RatioStats,
    Record,
    Run,
    SamplerInfo,
    Score,
    ToolCall,
    ToolResult,
    TurnTraining,
)
from agentrl.schema.base import utc_now
from agentrl.schema.run import ServerLoad
from agentrl.schema.training import EQUAL_SCORES
from agentrl.store import TrajectoryStore
from agentrl.store.views.sampling_progress import SamplingProgress


def training(
    turn_id: str, step: int, *, consumer: str = "trainer", trained: int = 5
) -> TurnTraining:
    record_id = turn_id.rsplit("/", 2)[0]
    return TurnTraining(
        id=f"{consumer}/{step}/{turn_id}",
        consumer=consumer,
        step=step,
        turn_id=turn_id,
        record_id=record_id,
        task_id=record_id.rsplit("/", 1)[0],
        num_tokens=7,
        num_trained_tokens=trained,
        masked={"ratio_out_of_range": 7 - trained},
        advantage=0.5,
        staleness=1,
        ratio=RatioStats(mean=1.0, std=0.1, min=0.8, max=1.2),
    )


async def play_with_a_tool(store: TrajectoryStore) -> Record:
    record = await claim(store)
    call = ToolCall(id="c1", name="lookup", arguments={"q": "lamp"})
    await store.turns.append(make_turn(record, 0, version=2, tool_calls=[call]), record.fence)
    result = ToolResult(call_id="c1", name="lookup", content="4 euro")
    await store.turns.set_tool_results(
        f"{record.id}/{record.fence}/0", record.id, record.fence, [result]
    )
    await store.turns.append(make_turn(record, 1, version=3), record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    score = Score(scorer="exact", version="2", value=1.0)
    await store.scores.set(record.id, record.fence, score)
    return await read_back(store, record)


async def test_a_step_leads_to_its_tool_calls_and_a_record_back_to_its_steps(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0)])
    first = await play_with_a_tool(store)
    second = await play(store, await claim(store), score=0.0)
    await store.ledger.reserve("trainer", [first.id], 4)
    await store.ledger.drop("trainer", [second.id], 4, "zero_advantage")
    await store.ledger.commit("trainer", 4)
    await store.policies.publish(Policy(version=4, path="p/4", checksum="ab", num_bytes=1))
    await store.ledger.put_turn_trainings([training(turn, 4) for turn in first.turns])

    step = await store.lineage.of_step(4)
    assert step.policy is not None
    assert step.policy.path == "p/4"
    (trained,) = step.trained
    assert (trained.record_id, trained.scorer, trained.scorer_version) == (first.id, "exact", "2")
    assert trained.turns[0].tool_calls[0].arguments == {"q": "lamp"}
    assert trained.turns[0].tool_results[0].content == "4 euro"
    assert [one.masked for one in trained.turns[1].trainings] == [{"ratio_out_of_range": 2}]
    assert [(one.record_id, one.ledger["trainer"].reason) for one in step.dropped] == [
        (second.id, "zero_advantage")
    ]
    assert step.dropped[0].turns[0].trainings == ()

    back = await store.lineage.of_record(first.id)
    assert back.ledger["trainer"].trained_at == (4,)
    assert back == trained
    with pytest.raises(StoreError, match="consumed no records at step 5"):
        await store.lineage.of_step(5)


async def test_a_recovery_forgets_what_lost_steps_made_of_turns(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    first, second = await fill(store, 1)
    await store.ledger.reserve("trainer", [first, second], 1)
    turn = f"{first}/1/0"
    await store.ledger.put_turn_trainings(
        [training(turn, 1), training(turn, 2), training(turn, 2, consumer="other")]
    )
    await store.ledger.put_turn_trainings(
        [training(turn, 2, trained=3)]
    )  # a repeated step replaces
    (before,) = (await store.lineage.of_record(first)).turns
    assert [(t.consumer, t.step, t.num_trained_tokens) for t in before.trainings] == [
        ("other", 2, 5),
        ("trainer", 1, 5),
        ("trainer", 2, 3),
    ]
    await store.ledger.recover("trainer", 1)
    (after,) = (await store.lineage.of_record(first)).turns
    assert [(t.consumer, t.step) for t in after.trainings] == [("other", 2), ("trainer", 1)]


async def test_an_edited_question_shows_in_the_lineage(store: TrajectoryStore) -> None:
    first, _ = await fill(store, 1)
    before = await store.lineage.of_record(first)
    assert len(before.task_version) == 16
    assert not before.task_changed
    await store.database["tasks"].update_one({}, {"$set": {"answer": 5}})
    after = await store.lineage.of_record(first)
    assert after.task_version == before.task_version
    assert after.task_changed


async def test_a_story_shows_any_attempt(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0, num_generations=1)])
    dead = await claim(store)
    await store.turns.append(make_turn(dead, 0, text="dead"), dead.fence)
    await store.records.fail_attempt(dead.id, dead.fence, "the tools are gone", 3)
    unscored = await store.reports.record_detail(dead.id)
    assert unscored.lineage.scorer is None
    await play(store, await claim(store), num_turns=2)

    story = await store.reports.record_detail(dead.id)
    assert (story.attempt, len(story.turns), story.task.id) == (2, 2, dead.task_id)
    np.testing.assert_array_equal(story.turns[1].output_ids, make_turn(dead, 1).output_ids)
    earlier = await store.reports.record_detail(dead.id, 1)
    assert [turn.output_text for turn in earlier.turns] == ["dead"]
    with pytest.raises(StoreError, match=r"has 2 attempt\(s\), not 7"):
        await store.reports.record_detail(dead.id, 7)
    with pytest.raises(StoreError, match=f"'x' does not exist .* ids look like '{dead.id}'"):
        await store.reports.record_detail("x")

    (failure,) = await store.reports.failures()
    assert failure.record_id == dead.id
    assert (failure.num_attempts, failure.num_failed_attempts) == (2, 1)
    assert failure.last_error == "the tools are gone"


async def test_exceptions_of_an_agent_are_counted_and_shown_with_their_place(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0, num_generations=2)])
    await play(store, await claim(store))
    record = await claim(store)
    await store.turns.append(make_turn(record, 0), record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="agent_error", final_answer=None, lease_seconds=60
    )
    score = Score(scorer="exact", value=0, detail="agent_error: KeyError: 'id' (own.py:23)")
    await store.scores.set(record.id, record.fence, score)

    (failure,) = await store.reports.agent_errors()
    assert (failure.record_id, failure.error) == (record.id, score.detail)
    assert await store.reports.failures() == []
    assert (
        "1 of 2 attempts ended with an exception of the agent; the last: KeyError: 'id' (own.py:23)"
        in str(await store.reports.first_answers())
    )


async def test_servers_say_what_is_sampled_and_samplers_that_are_gone_are_shown_so(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    for name, rate in (("a", 40.0), ("b", 2.5)):
        load = ServerLoad(num_running=1, num_waiting=0, token_usage=0.5, tokens_per_second=rate)
        service = InferenceService(
            id=name, base_url="http://x", backend="embedded", model_path="m", load=load
        )
        await store.services.register(service)
    progress = await store.reports.progress()
    assert (progress.tokens_per_second, progress.server_problem) == (42.5, "")
    await store.services.set_status("a", status="down", error="no answer within 10 s")
    assert (await store.reports.progress()).server_problem == ""
    await store.services.set_status("b", status="down", error="stopped")
    assert (await store.reports.progress()).server_problem == ""
    await store.services.set_status("b", status="down", error="unhealthy")
    assert (await store.reports.progress()).server_problem == "no answer within 10 s"
    for name, age in (("gone", 61), ("here", 5)):
        heartbeat = utc_now() - timedelta(seconds=age)
        await store.samplers.register(
            SamplerInfo(id=name, host="h", pid=1, started_at=heartbeat, heartbeat_at=heartbeat)
        )
    samplers = (await store.reports.processes()).samplers
    assert [(one.id, one.status) for one in samplers] == [("gone", "stopped"), ("here", "sampling")]


async def test_a_summary_counts_and_names_who_is_there(store: TrajectoryStore) -> None:
    with pytest.raises(StoreError, match="contains no run"):
        await store.reports.summary()
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0), make_task(1, split="eval")])
    for score in (0.0, 1.0, 1.0, 0.0):
        await play(store, await claim(store), score=score)
    await store.samplers.register(SamplerInfo(id="s", host="h", pid=1, num_output_tokens=9))
    await store.services.register(
        InferenceService(id="e", base_url="http://h", backend="embedded", model_path="m")
    )
    view = await store.reports.overview("trainer")
    assert (view.summary.num_groups, view.summary.num_groups_completed) == (1, 1)
    assert view.summary.mean_score == 0.5
    assert view.summary.num_output_tokens == 9
    assert [one.id for one in view.processes.services] == ["e"]
    assert abs((view.processes.now - view.processes.samplers[0].heartbeat_at).total_seconds()) < 60
    assert store.database_name in await store.reports.run_names()


async def test_sampling_shows_the_last_answers_the_longest_rollout_and_dropped_groups(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=9))
    assert await store.reports.sampling() == SamplingProgress()
    await store.tasks.add(make_task(number, num_generations=2) for number in range(3))
    records = [
        await play(store, await claim(store), score=score, num_turns=turns)
        for score, turns in [(0.0, 1), (0.0, 1), (1.0, 2), (0.0, 3)]
    ]
    running = await claim(store)
    await store.turns.append(make_turn(running, 0), running.fence)
    await claim(store)
    dropped = [record.id for record in records if record.task_id == records[0].task_id]
    await store.groups.complete([records[0].task_id])
    await store.ledger.drop("trainer", dropped, 1, EQUAL_SCORES)

    found = await store.reports.sampling()
    assert found.recent is not None
    assert (found.recent.num_answers, found.recent.mean_score) == (4, 0.25)
    assert (found.recent.num_above_0, found.recent.num_without_answer) == (1, 0)
    tokens = [record.num_output_tokens for record in records]
    assert (found.recent.median_tokens, found.recent.longest_tokens) == (tokens[2], tokens[3])
    assert found.longest is not None
    assert (found.longest.record_id, found.longest.num_turns) == (running.id, 1)
    assert found.longest.num_output_tokens > 0
    assert 0 <= found.longest.seconds < 60
    assert found.num_dropped == 1


async def test_processes_of_different_releases_are_named(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.samplers.register(SamplerInfo(id="elsewhere:1:0-a", host="h", pid=1, release="1.0"))
    service = InferenceService(
        id="s", base_url="http://s", backend="embedded", model_path="m", release="1.0"
    )
    await store.services.register(service)
    assert (await store.reports.processes()).mixed_releases == ""
    await store.trainer_leases.acquire("trainer", "elsewhere:2:0-b", 60)
    warning = (await store.reports.processes()).mixed_releases
    assert "trainer elsewhere:2:0-b; 1.0: sampler elsewhere:1:0-a, inference server s" in warning

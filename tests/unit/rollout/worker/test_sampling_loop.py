import asyncio
import logging
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.scripted_engine import ScriptedEngine, serve_script
from support.patience import PATIENCE
from support.play import ExactScoring, begin_run, claim, open_play, service, tool_call

from agentrl.config.sections import RolloutSection
from agentrl.errors import RunDropped, ScorerTimeout, StoreError, ToolError
from agentrl.inference.client import pool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import GroundTruth, MCPScorerFactory, RegisteredScoring
from agentrl.rollout import AsyncSampler, MCPSampler, RolloutContext, RolloutResult
from agentrl.rollout.context_edits import WORK_DISCARDED
from agentrl.rollout.worker import attempt as attempts
from agentrl.rollout.worker.attempt import LeaseRenewal, RolloutAttempt, SlotCounts
from agentrl.rollout.worker.sampler_process import sampler_metrics
from agentrl.rollout.worker.sampling_loop import LoopTimes, SamplingLoop
from agentrl.schema import (
    MCPTask,
    Run,
    SamplerInfo,
    Score,
    ServerLoad,
    rebuild_prompts,
    utc_now,
)
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

FOREVER = 3600
"""Seconds that a tool call takes which nobody waits for."""
ANSWER = "<answer>7</answer>"
TIMES = LoopTimes(
    busy_refresh=0.05, idle_poll=0.05, report=0.1, scoring=0.1, scoring_grace=1.0, log_progress=0.08
)


def task(number: int, num_generations: int = 2) -> MCPTask:
    return MCPTask(
        id=f"train/0/q{number}",
        order=number,
        num_generations=num_generations,
        query=f"Question {number}?",
        answer="7",
    )


def look_then_answer(prompt: str) -> str:
    return ANSWER if "<tool_response>" in prompt else tool_call("look", key="lamp")


def make_loop(context: RolloutContext) -> SamplingLoop:
    return SamplingLoop(context, "tester", MCPSampler, times=TIMES)


@asynccontextmanager
async def running(context: RolloutContext) -> AsyncIterator[tuple[SamplingLoop, asyncio.Event]]:
    """A loop in the background; it is stopped and awaited at the end."""
    loop, stop, abandoned = make_loop(context), asyncio.Event(), asyncio.Event()
    job = asyncio.create_task(loop.run(stop, abandoned))
    try:
        yield loop, stop
        stop.set()
        await asyncio.wait_for(job, PATIENCE)
    finally:
        job.cancel()
        await asyncio.wait([job])


def events(number: int) -> list[asyncio.Event]:
    return [asyncio.Event() for _ in range(number)]


async def run_to_end(loop: SamplingLoop) -> None:
    await asyncio.wait_for(loop.run(asyncio.Event(), asyncio.Event()), PATIENCE)


async def wait_for(done: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            found = done()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


async def until(store: TrajectoryStore, **wanted: int) -> None:
    """Wait until this many records have these statuses."""

    async def counted() -> bool:
        found = dict.fromkeys(wanted, 0)
        async for record in store.records.find():
            if record.status in found:
                found[record.status] += 1
        return found == wanted

    await wait_for(counted)


async def several_looks(store: TrajectoryStore) -> None:
    """Wait until the sampler has reported three times; it looks for work more often than that."""
    for _ in range(3):
        (before,) = await store.samplers.all()

        async def reported(before: SamplerInfo = before) -> bool:
            (info,) = await store.samplers.all()
            return info.heartbeat_at > before.heartbeat_at

        await wait_for(reported)


async def acknowledged_turns(store: TrajectoryStore, record_id: str) -> tuple[str, ...]:
    record = await store.records.get(record_id)
    assert record is not None
    return record.turns


async def test_slots_are_claimed_played_and_scored_until_nothing_is_left(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rollout = RolloutSection(exit_when_done=True, max_concurrent_samples_per_process=4)
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, *(task(k) for k in range(5)))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = make_loop(context)
            await run_to_end(loop)
    assert (loop.counts.finished, loop.counts.scored) == (10, 10)
    groups = await store.ledger.ready_groups("trainer", split="train", limit=10, step=1)
    assert [len(group) for group in groups] == [2] * 5
    sent = {bytes(str(body["input_ids"]), "ascii") for body in engine.requests}
    for data in (data for group in groups for data in group):
        record = await store.records.get(data.record_id)
        assert record is not None
        assert (record.status, record.outcome, record.final_answer) == ("scored", "answered", "7")
        assert data.score is not None
        assert data.score.value == 1.0
        assert await store.tasks.get(data.task_id) is not None
        assert record.turns == data.turn_ids == tuple(turn.id for turn in data.turns)
        for prompt in rebuild_prompts(data.turns):
            assert bytes(str(prompt.tolist()), "ascii") in sent
    (info,) = await store.samplers.all()
    assert (info.status, info.num_finished, info.num_running) == ("stopped", 10, 0)
    assert re.search(r"rollouts: \d+ running, \d+ finished, \d+ tokens$", caplog.text, re.MULTILINE)


async def test_branches_are_counted_by_reason_and_exposed(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    def stammer(prompt: str) -> str:
        return ANSWER if WORK_DISCARDED in prompt else tool_call("look", key="lamp")

    rollout = RolloutSection(
        exit_when_done=True,
        new_context="discard_all",
        repetition_early_stop_times=2,
        enable_repetition_compress=True,
    )
    with serve_script(renderer, stammer) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = make_loop(context)
            await run_to_end(loop)
    assert loop.counts.branches == {"repetition_discard_all": 2}
    (family,) = [one for one in sampler_metrics(loop.state) if one.name.endswith("branches")]
    (sample,) = family.samples
    assert (sample.name, sample.value) == ("agentrl_sampler_branches_total", 2)
    assert sample.labels == {"reason": "repetition_discard_all"}


@pytest.mark.parametrize(
    ("given", "others", "expected"),
    [
        ({"target_concurrency": 2}, [], 2),
        ({}, [], 5),
        ({}, [{}], 3),
        ({}, [{"status": "draining"}, {"cordoned_by": "me"}, {"generates": False}], 5),
    ],
)
async def test_no_more_rollouts_run_at_once_than_the_servers_are_to_get(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    given: dict[str, int],
    others: list[dict[str, Any]],
    expected: int,
) -> None:
    """A server runs five requests at once, and other samplers take their share of it."""
    rollout = RolloutSection(exit_when_done=True, **given)
    load = ServerLoad(num_running=0, num_waiting=0, max_running=5, token_usage=0.0)
    for number, fields in enumerate(others):
        await store.samplers.register(SamplerInfo(id=f"other:{number}", host="h", pid=1, **fields))
    most = 0

    class Counting(MCPSampler):
        num_running = 0

        async def run(self) -> RolloutResult:
            nonlocal most
            Counting.num_running += 1
            most = max(most, Counting.num_running)
            try:
                return await super().run()
            finally:
                Counting.num_running -= 1

    with serve_script(renderer, look_then_answer, delay_seconds=0.1) as engine:
        await begin_run(store, engine, *(task(k, num_generations=8) for k in range(2)))
        reporting = {"load": load, "takes_priorities": True}
        await store.services.register(service(engine).model_copy(update=reporting))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = SamplingLoop(context, "tester", Counting, times=TIMES)
            await run_to_end(loop)
    assert loop.counts.scored == 16
    assert most == expected
    # Every rollout has its place in the servers' queue, for both of its turns.
    places = sorted((body["priority"] for body in engine.requests), reverse=True)
    assert places == sorted(2 * [-10_000 * k - n for k in range(2) for n in range(8)], reverse=True)


async def test_servers_do_not_wait_for_a_slow_judge_but_what_it_leaves_is_bounded(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    rollout = RolloutSection(max_concurrent_samples_per_process=2, exit_when_done=True)
    verdict = asyncio.Event()
    num_played = 0

    class SlowlyJudged(MCPSampler):
        async def run(self) -> RolloutResult:
            nonlocal num_played
            num_played += 1
            return await super().run()

        async def evaluate_record(self, result: RolloutResult) -> Score:
            await verdict.wait()
            return await super().evaluate_record(result)

    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0, num_generations=8))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = SamplingLoop(context, "tester", SlowlyJudged, times=TIMES)
            job = asyncio.create_task(loop.run(asyncio.Event(), asyncio.Event()))
            await until(store, finished=4)
            await several_looks(store)
            assert num_played == 4
            verdict.set()
            await asyncio.wait_for(job, PATIENCE)
    assert (loop.counts.scored, num_played) == (8, 8)


async def test_only_admitted_groups_are_claimed(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0), task(1))
        await store.runs.set_admission(1)
        async with (
            open_play(store, engine, tools_url) as context,
            running(context) as (loop, _),
        ):
            await until(store, scored=2, pending=2)
            await several_looks(store)
            await until(store, scored=2, pending=2)
            await store.runs.set_admission(2)
            await until(store, scored=4)
    (info,) = await store.samplers.all()
    assert info.seconds_waiting["admission"] > 0.1
    assert loop.counts.scored == 4


async def test_scoring_may_be_left_to_a_process_that_runs_nothing(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0))
        player = RolloutSection(scoring="elsewhere")
        async with open_play(store, engine, tools_url, rollout=player) as context, running(context):
            await until(store, finished=2)
            assert isinstance(context.scoring, ExactScoring)
            assert context.scoring.num_scored == 0
        judge = RolloutSection(scoring="only", exit_when_done=True)
        await store.tasks.add([task(1)])
        async with (
            open_play(store, engine, tools_url, rollout=judge) as context,
            running(context) as (loop, _),
        ):
            await until(store, scored=2, pending=2)
        assert (loop.counts.scored, loop.counts.finished) == (2, 0)


async def test_a_paused_run_is_not_sampled(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0))
        await store.runs.update_control(sampling_paused=True)
        async with (
            open_play(store, engine, tools_url) as context,
            running(context) as (loop, _),
        ):
            await wait_for(lambda: "paused" in loop.state.seconds_waiting)
            await several_looks(store)
            await until(store, pending=2)
            await store.runs.update_control(sampling_paused=False)
            await until(store, scored=2)


async def test_a_cordoned_sampler_finishes_what_it_runs_and_claims_nothing_more(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer, delay_seconds=0.3) as engine:
        await begin_run(store, engine, *(task(number) for number in range(3)))
        rollout = RolloutSection(max_concurrent_samples_per_process=1)
        async with (
            open_play(store, engine, tools_url, rollout=rollout) as context,
            running(context) as (loop, _),
        ):
            await wait_for(lambda: len(engine.requests) > 0)
            assert await store.samplers.cordon("tester", "ann@host") == ["tester"]
            await wait_for(lambda: "cordoned" in loop.state.seconds_waiting)
            await wait_for(lambda: loop.state.num_running == 0)
            pending = await store.database["records"].count_documents({"status": "pending"})
            assert pending > 0
            await several_looks(store)
            await until(store, pending=pending, scored=6 - pending)
            with pytest.raises(
                StoreError, match=r"no sampler at work is named 'test'; at work: tester"
            ):
                await store.samplers.cordon("test", "ann@host")
            await store.samplers.cordon("tester", "")
            await until(store, scored=6)


BAD_CONTROLS: dict[str, tuple[Any, str]] = {
    "max_staleness": (-5, "max_staleness: Input should be greater than or equal to 0, got -5"),
    "temperature": (1e9, "temperature: Input should be less than or equal to 1000000, got 1"),
    "top_k": (2**40, "top_k: Input should be less than or equal to 1000000000"),
    "repetition_penalty": (1e-9, "repetition_penalty: Input should be greater than or equal to"),
    "groups_per_step": (0, "groups_per_step: Input should be greater than or equal to 1, got 0"),
    "concurrency": (0, "concurrency: Input should be greater than or equal to 1, got 0"),
    "scorer": ("nosuch", "scorer: .*nosuch"),
}


@pytest.mark.parametrize("name", BAD_CONTROLS)
async def test_a_bad_control_pauses_the_claims_and_costs_no_attempt(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    value, problem = BAD_CONTROLS[name]
    edited = {f"control.{name}": value}
    with serve_script(renderer, look_then_answer, delay_seconds=0.3) as engine:
        scored = [task(number).model_copy(update={"scorer": "math"}) for number in range(3)]
        await begin_run(store, engine, *scored)
        rollout = RolloutSection(max_concurrent_samples_per_process=1)
        scoring = RegisteredScoring()
        async with (
            open_play(store, engine, tools_url, rollout=rollout, scoring=scoring) as context,
            running(context) as (loop, _),
        ):
            await wait_for(lambda: len(engine.requests) > 0)
            await store.database["runs"].update_one({}, {"$set": edited})
            await wait_for(lambda: "bad_control" in loop.state.seconds_waiting)
            await wait_for(lambda: loop.state.num_running == 0)
            await several_looks(store)
            (info,) = await store.samplers.all()
            assert re.search(problem, info.notice)
            assert re.search(problem, caplog.text)
            pending = await store.database["records"].count_documents({"status": "pending"})
            assert pending > 0
            await several_looks(store)
            await until(store, pending=pending, scored=6 - pending)
            await store.runs.update_control(**{name: None})
            await until(store, scored=6)
    assert await store.database["records"].count_documents({"attempt": {"$ne": 1}}) == 0


async def test_a_sampler_of_a_dropped_database_ends_and_says_so(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer, delay_seconds=0.3) as engine:
        await begin_run(store, engine, *(task(number) for number in range(50)))
        async with open_play(store, engine, tools_url) as context:
            loop = make_loop(context)
            job = asyncio.create_task(run_to_end(loop))
            await wait_for(lambda: len(engine.requests) > 0)
            await store.drop_database()
            with pytest.raises(RunDropped, match="was dropped or emptied"):
                await job


async def test_live_changes_reach_rollouts_at_the_next_refresh(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    class Counting(MCPSampler):
        num_running = 0

        async def run(self) -> RolloutResult:
            Counting.num_running += 1
            try:
                return await super().run()
            finally:
                Counting.num_running -= 1

    with serve_script(renderer, look_then_answer, delay_seconds=0.1) as engine:
        await begin_run(store, engine, *(task(k) for k in range(200)))
        async with open_play(store, engine, tools_url) as context:
            loop, stop, abandoned = SamplingLoop(context, "t", Counting), *events(2)
            job = asyncio.create_task(loop.run(stop, abandoned))
            await wait_for(lambda: len(engine.requests) > 0)
            await store.runs.update_control(
                concurrency=1, temperature=0.25, max_new_tokens=33, scorer="strict"
            )
            await wait_for(lambda: loop.state.max_running == 1 and Counting.num_running <= 1)
            seen = len(engine.requests)
            changed_at = utc_now()
            await wait_for(lambda: len(engine.requests) >= seen + 3)
            assert Counting.num_running <= 1
            abandoned.set()
            stop.set()
            await job
    assert LoopTimes().busy_refresh < 2, "changes reach rollouts within two seconds"
    for body in engine.requests[seen:]:
        params = body["sampling_params"]
        assert (params["temperature"], params["max_new_tokens"]) == (0.25, 33)
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 200
    scores = [r.score async for r in store.records.find(status="scored") if r.score is not None]
    assert {s.scorer for s in scores if s.scored_at > changed_at} == {"strict"}


async def test_a_sampler_that_comes_first_waits_for_run_server_and_tasks(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        async with (
            open_play(store, engine, tools_url) as context,
            running(context) as (loop, _),
        ):
            await wait_for(lambda: "no_run" in loop.state.seconds_waiting)
            await store.runs.create(Run(name="test", admitted_groups=10))
            await wait_for(lambda: "no_server" in loop.state.seconds_waiting)
            await store.services.register(service(engine))
            await wait_for(lambda: "no_task" in loop.state.seconds_waiting)
            await store.tasks.add([task(0)])
            await until(store, scored=2)
    (info,) = await store.samplers.all()
    assert {"no_run", "no_server", "no_task"} <= info.seconds_waiting.keys()


async def test_a_sampler_without_a_live_server_says_so_at_once_and_every_half_minute(
    store: TrajectoryStore,
    renderer: Renderer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    passed = 0.0
    monkeypatch.setattr(
        "agentrl.rollout.worker.admission_limits.time.monotonic",
        lambda: time.perf_counter() + passed,
    )

    def said() -> list[float]:
        return [
            line.created
            for line in caplog.records
            if line.levelno == logging.WARNING
            and line.getMessage().startswith(
                f"run {store.database_name}: no registered inference server is alive"
            )
        ]

    await store.runs.create(Run(name="test", admitted_groups=10))
    with serve_script(renderer, look_then_answer) as engine:
        async with open_play(store, engine, None) as context:
            loop, stop = SamplingLoop(context, "tester", MCPSampler), asyncio.Event()
            began = time.time()
            job = asyncio.create_task(loop.run(stop, asyncio.Event()))
            await wait_for(lambda: len(said()) == 1)
            assert said()[0] - began < 2
            passed = LoopTimes().log_waiting + 1
            await wait_for(lambda: len(said()) == 2)
            await store.services.register(service(engine))
            await wait_for(lambda: "an inference server is alive" in caplog.text)
            assert len(said()) == 2
            stop.set()
            await asyncio.wait_for(job, PATIENCE)
    assert LoopTimes().log_waiting <= 30


async def test_a_completed_run_ends_the_sampler(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url) as context:
            job = asyncio.create_task(make_loop(context).run(asyncio.Event(), asyncio.Event()))
            await until(store, scored=2)
            await store.runs.set_status("completed")
            await asyncio.wait_for(job, PATIENCE)


async def test_a_completed_run_leaves_no_group_incomplete(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    rollout = RolloutSection(max_concurrent_samples_per_process=3)
    gate = threading.Event()
    with serve_script(renderer, look_then_answer, gate=gate) as engine:
        await begin_run(store, engine, task(0), task(1), task(2))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            job = asyncio.create_task(make_loop(context).run(asyncio.Event(), asyncio.Event()))
            await until(store, running=3)
            await store.runs.set_status("completed")
            await several_looks(store)
            gate.set()
            await asyncio.wait_for(job, PATIENCE)
    statuses = [[r.status for r in await store.records.of_task(f"train/0/q{k}")] for k in range(3)]
    assert statuses == [["scored"] * 2, ["scored"] * 2, ["pending"] * 2]


async def test_a_stop_releases_running_slots_without_counting_an_attempt(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    calls = tool_call("slow", seconds=FOREVER)
    rollout = RolloutSection(max_attempts=1)
    with serve_script(renderer, lambda _: calls) as engine:
        await begin_run(store, engine, task(0))
        async with (
            open_play(store, engine, tools_url, rollout=rollout) as context,
            running(context) as (loop, stop),
        ):
            await until(store, running=2)
            await wait_for(lambda: len(engine.requests) > 0)
            stop.set()
            await until(store, pending=2)
    assert loop.counts.released == 2
    record = await store.records.get("train/0/q0/0")
    assert record is not None
    assert [attempt.ended_by for attempt in record.attempts] == ["released"]
    assert record.lease is None


async def test_an_attempt_that_a_dead_database_ends_does_not_count(
    renderer: Renderer,
    tools_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    with (
        serve_script(renderer, look_then_answer, gate=gate) as engine,
        EmbeddedMongo(tmp_path / "mongo") as mongo,
    ):
        async with TrajectoryStore.connect(mongo.uri("run"), outage_seconds=0.5) as store:
            await store.ensure_schema()
            await begin_run(store, engine, task(0))
            async with (
                open_play(store, engine, tools_url, rollout=RolloutSection(max_attempts=1)) as play,
                running(play) as (_, _),
            ):
                await until(store, running=2)
                await wait_for(lambda: len(engine.requests) > 1)
                os.kill(mongo.pid, signal.SIGKILL)
                gate.set()
                await wait_for(lambda: "released (append a turn: MongoDB" in caplog.text)
                mongo.stop()
                mongo.start()
                await until(store, scored=2)
            records = await store.records.of_task("train/0/q0")
    ends = [attempt.ended_by for record in records for attempt in record.attempts]
    assert "error" not in ends


async def test_running_rollouts_get_the_drain_time(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    rollout = RolloutSection(drain_seconds=PATIENCE)
    gate = threading.Event()
    with serve_script(renderer, look_then_answer, gate=gate) as engine:
        await begin_run(store, engine, task(0))
        async with (
            open_play(store, engine, tools_url, rollout=rollout) as context,
            running(context) as (loop, stop),
        ):
            await until(store, running=2)
            stop.set()
            await several_looks(store)
            await until(store, running=2)
            gate.set()
            await until(store, scored=2)
    assert loop.counts.released == 0


async def test_a_holder_that_lost_its_lease_writes_nothing_more(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    gate = threading.Event()

    def hold_the_second_reply(prompt: str) -> str:
        engine.gate = gate
        return look_then_answer(prompt)

    with serve_script(renderer, hold_the_second_reply) as engine:
        await begin_run(store, engine, task(0, num_generations=1))
        async with open_play(store, engine, tools_url) as context:
            record, claimed = await claim(store)
            counts = SlotCounts()
            attempt = RolloutAttempt(
                claimed, record, context, MCPSampler, counts, on_generated=lambda: None
            )
            job = attempt.start()
            await wait_for(lambda: len(engine.requests) == 2)
            # The second reply is under way when the slot goes to another process.
            assert await acknowledged_turns(store, record.id)
            await store.records.release(record.id, record.fence)
            second, _ = await claim(store)
            gate.set()
            await job
    assert counts == SlotCounts(lost=1)
    after = await store.records.get(record.id)
    assert after is not None
    assert (after.status, after.fence, after.turns) == ("running", second.fence, ())
    assert after.outcome is None
    (turn,) = await store.turns.of_record(record.id, attempt=1)
    assert turn.tool_calls[0].name == "look"


@pytest.mark.parametrize("scoring_only", [False, True])
async def test_an_attempt_that_is_cancelled_before_it_began_releases_its_slot(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, scoring_only: bool
) -> None:
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url) as context:
            record, claimed = await claim(store)
            attempt = RolloutAttempt(
                claimed, record, context, MCPSampler, SlotCounts(), on_generated=lambda: None
            )
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", RuntimeWarning)
                job = attempt.start(scoring_only=scoring_only)
                attempt.cancel("release")
                await asyncio.wait([job])
            again, _ = await claim(store)
    assert [str(one.message) for one in warned] == []
    assert (again.id, [attempt.ended_by for attempt in again.attempts]) == (
        record.id,
        ["released", None],
    )


async def test_a_lost_lease_stops_its_rollout_at_the_next_heartbeat(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, lambda _: tool_call("slow", seconds=FOREVER)) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url) as context:
            renewal = LeaseRenewal(store, 30)
            held = []
            for _ in range(2):
                record, claimed = await claim(store)
                attempt = RolloutAttempt(
                    claimed, record, context, MCPSampler, SlotCounts(), on_generated=lambda: None
                )
                renewal.add(attempt)
                held.append((attempt, attempt.start()))
            (lost, lost_job), (kept, kept_job) = held
            await store.records.release(*lost.lease)
            await renewal.renew()
            await asyncio.wait_for(lost_job, PATIENCE)
            assert (lost.cancel_reason, kept.cancel_reason) == ("lease_lost", None)
            kept.cancel("release")
            await kept_job
    record_after = await store.records.get(lost.record.id)
    assert record_after is not None
    assert record_after.status == "pending"


async def test_a_judge_outage_is_no_score_and_is_tried_again(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "SCORING_RETRY_SECONDS", 0.2)
    many = 1_000_000
    scoring = ExactScoring(outages=many)
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0, num_generations=1))
        async with (
            open_play(store, engine, tools_url, scoring=scoring) as context,
            running(context),
        ):
            await until(store, finished=1)
            record = await store.records.get("train/0/q0/0")
            assert record is not None
            assert record.score is None
            await wait_for(lambda: scoring.outages <= many - 3)
            scoring.outages = 0
            await until(store, scored=1)
    assert scoring.num_scored == 1
    assert len(engine.requests) == 2


@pytest.fixture
def float_scorer() -> Iterator[None]:
    """The scorer `close`, which cannot read a word."""
    before = dict(MCPScorerFactory._scorers)

    @MCPScorerFactory.register_scorer("close")
    def close(answer: str, truth: GroundTruth) -> float:
        return float(abs(float(answer) - float(truth.answer)) < 0.01)

    yield
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


@pytest.mark.usefixtures("float_scorer")
async def test_a_scorer_that_raises_the_same_way_twice_costs_the_record_and_not_the_group(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(attempts, "DEFECT_RETRY_SECONDS", 0.05)
    answers = iter(["<answer>about seven</answer>", ANSWER, "<answer>a lamp</answer>", ANSWER])
    rollout = RolloutSection(exit_when_done=True, max_concurrent_samples_per_process=1)
    questions = [task(n).model_copy(update={"scorer": "close"}) for n in (0, 1)]
    with serve_script(renderer, lambda _: next(answers)) as engine:
        await begin_run(store, engine, *questions)
        scoring = RegisteredScoring()
        async with open_play(store, engine, tools_url, rollout=rollout, scoring=scoring) as context:
            loop = make_loop(context)
            await run_to_end(loop)
    assert (loop.counts.scored, loop.counts.unscorable, loop.counts.failed) == (2, 2, 0)
    groups = await store.ledger.ready_groups("trainer", split="train", limit=10, step=1)
    assert [[data.score and data.score.value for data in group] for group in groups] == [
        [None, 1.0],
        [None, 1.0],
    ]
    record = await store.records.get("train/0/q0/0")
    assert record is not None
    assert (record.status, record.outcome, record.final_answer) == (
        *("failed", "answered", "about seven"),
    )
    assert record.error is not None
    assert record.error.startswith(
        "scorer 'close' failed: ValueError: could not convert string to float: 'about seven' ("
    )
    assert re.search(r"test_sampling_loop\.py:\d+\)$", record.error)
    (warning,) = [r.getMessage() for r in caplog.records if "scorer 'close'" in r.getMessage()]
    assert "train/0/q0/0" in warning
    assert "'about seven'" in warning
    assert "agentrl store rescore --scorer close" in warning


async def test_a_scorer_that_hangs_is_not_tried_again(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    num_tries = 0

    class Hangs(MCPSampler):
        async def evaluate_record(self, result: RolloutResult) -> Score:
            nonlocal num_tries
            num_tries += 1
            raise ScorerTimeout("no score within 1 s", kind="slow", is_certain=True)

    with serve_script(renderer, lambda _: ANSWER) as engine:
        await begin_run(store, engine, task(0))
        rollout = RolloutSection(exit_when_done=True)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = SamplingLoop(context, "t", Hangs, times=TIMES)
            await run_to_end(loop)
    assert (loop.counts.unscorable, num_tries) == (2, 2)


async def test_a_users_own_scoring_that_raises_is_bounded_but_an_outage_behind_it_is_not(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "DEFECT_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(attempts, "SCORING_RETRY_SECONDS", 0.05)
    num_tries = 0

    class ScoresItself(MCPSampler):
        async def evaluate_record(self, result: RolloutResult) -> Score:
            nonlocal num_tries
            if self.record.traj_id == 0:
                raise KeyError("speed")
            num_tries += 1
            try:
                raise ConnectionRefusedError("the judge is down")
            except ConnectionRefusedError as error:
                raise RuntimeError("no verdict") from error

    with serve_script(renderer, lambda _: ANSWER) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url) as context:
            loop, stop = SamplingLoop(context, "t", ScoresItself, times=TIMES), asyncio.Event()
            job = asyncio.create_task(loop.run(stop, asyncio.Event()))
            await until(store, failed=1)
            await wait_for(lambda: num_tries > 4)
            stop.set()
            await job
    waiting = await store.records.get("train/0/q0/1")
    assert waiting is not None
    assert (waiting.status, waiting.score) == ("finished", None)
    assert waiting.error == "ScoringError: evaluate_record failed: RuntimeError: no verdict"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_score_that_is_no_finite_number_is_dead_lettered_with_the_reason(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    monkeypatch.setattr(attempts, "DEFECT_RETRY_SECONDS", 0.05)

    class DividesByZero(MCPSampler):
        async def evaluate_record(self, result: RolloutResult) -> Score:
            return Score(scorer="ratio", value=value if self.record.traj_id == 0 else 1.0)

    rollout = RolloutSection(exit_when_done=True)
    with serve_script(renderer, lambda _: ANSWER) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            await run_to_end(SamplingLoop(context, "t", DividesByZero, times=TIMES))
    first, second = await store.records.of_task("train/0/q0")
    assert (first.status, first.score) == ("failed", None)
    assert first.error is not None
    assert "a score must be a finite number" in first.error
    assert "\n" not in first.error
    assert second.score is not None


async def test_an_absent_server_is_no_failed_attempt(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_RETRY_SECONDS", (0.01,))
    rollout = RolloutSection(max_attempts=1)
    with serve_script(renderer, look_then_answer, down=True) as engine:
        await begin_run(store, engine, task(0))
        async with (
            open_play(store, engine, tools_url, rollout=rollout) as context,
            running(context) as (loop, _),
        ):
            await wait_for(lambda: loop.counts.released >= 2)
            engine.down = False
            await until(store, scored=2)
    assert loop.counts.failed == 0


async def test_an_outage_of_the_tools_costs_few_slots_an_attempt(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    class ToolsAway(MCPSampler):
        away = True

        async def run(self) -> RolloutResult:
            if ToolsAway.away:
                raise ToolError("the tool server is away")
            return await super().run()

    rollout = RolloutSection(max_concurrent_samples_per_process=4)
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, *(task(k) for k in range(10)))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop, stop = SamplingLoop(context, "tester", ToolsAway, times=TIMES), asyncio.Event()
            job = asyncio.create_task(loop.run(stop, asyncio.Event()))
            await wait_for(lambda: "trouble" in loop.state.seconds_waiting)
            assert loop.counts.failed <= 4 + 1
            ToolsAway.away = False
            await until(store, scored=20)
            stop.set()
            await job
    assert "trouble" in (await store.samplers.all())[0].seconds_waiting


async def test_a_slot_on_which_servers_keep_failing_is_dead_lettered_in_the_end(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_RETRY_SECONDS", (0.01,))
    rollout = RolloutSection(max_attempts=1, exit_when_done=True)
    with serve_script(renderer, look_then_answer, down=True) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            await run_to_end(make_loop(context))
    for record in await store.records.of_task("train/0/q0"):
        assert (record.status, record.attempt) == ("failed", 3)
        assert "queue is full" in str(record.error)


async def test_an_exception_of_a_users_sampler_fails_the_attempt_until_the_slot_is_dead_lettered(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    class Broken(AsyncSampler[MCPTask]):
        async def run(self) -> RolloutResult:
            raise KeyError("speed")

        async def evaluate_record(self, result: RolloutResult) -> Score:
            raise NotImplementedError

    rollout = RolloutSection(max_attempts=2, exit_when_done=True)
    with serve_script(renderer, look_then_answer) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            loop = SamplingLoop(context, "tester", Broken, times=TIMES)
            await run_to_end(loop)
    for record in await store.records.of_task("train/0/q0"):
        assert (record.status, record.attempt) == ("failed", 2)
        assert record.error == "KeyError: 'speed'"
    assert loop.counts.failed == 4


async def test_a_rollout_without_an_answer_scores_zero_without_a_judge(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    scoring = ExactScoring()
    rollout = RolloutSection(max_turns=1, exit_when_done=True)
    with serve_script(renderer, lambda _: tool_call("look", key="lamp")) as engine:
        await begin_run(store, engine, task(0))
        async with open_play(store, engine, tools_url, rollout=rollout, scoring=scoring) as context:
            await run_to_end(make_loop(context))
    for record in await store.records.of_task("train/0/q0"):
        assert record.outcome == "turns_limit"
        assert record.score is not None
        assert (record.score.value, record.score.detail) == (0.0, "turns_limit")
    assert scoring.num_scored == 0


def test_engines_and_samplers_agree_on_the_script(renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer, look_then_answer)
    ids = engine.reply_ids(ANSWER)
    assert renderer.parse(ids).content == ANSWER

"""How a slot ends that an agent plays."""

import asyncio
import sys
import threading
import time
from typing import Any

import openai
import pytest
from harness.scripted_engine import serve_script
from support.agents import client_of, open_stage
from support.play import begin_run, claim

from agentrl.config.sections import AgentSection, RolloutSection, RootConfig
from agentrl.errors import AgentError, ConfigError, InferenceError
from agentrl.plugins.environments.environment_sampler import EnvironmentSampler
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import (
    AgentEndpoint,
    AgentSampler,
    AgentThread,
    configured_agent,
    load_agent,
)
from agentrl.rollout.worker.attempt import RolloutAttempt, SlotCounts
from agentrl.schema import AgentResult, EnvironmentTask, MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")
ENVIRONMENT_TASK = EnvironmentTask(**dict(TASK), env_id="textarena:Maze-v0", row=0)


async def ask(endpoint: AgentEndpoint, text: str = "hello", **more: Any) -> str:
    async with client_of(endpoint) as client:
        completion = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": text}], **more
        )
    return completion.choices[0].message.content or ""


async def answers(task: MCPTask, endpoint: AgentEndpoint) -> str:
    return await ask(endpoint)


async def answers_in_its_own_words(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    return " 7 "


async def blocks_its_loop(task: MCPTask, endpoint: AgentEndpoint) -> str | None:
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        completion = client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": "hello"}]
        )
    return completion.choices[0].message.content


async def gives_up(task: MCPTask, endpoint: AgentEndpoint) -> None:
    await ask(endpoint)


async def chokes_on_the_reply(task: MCPTask, endpoint: AgentEndpoint) -> str:
    raise ValueError(f"no JSON: {await ask(endpoint)}")


async def ends_the_program(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    sys.exit(3)


def ends_the_program_in_its_thread(task: MCPTask, endpoint: AgentEndpoint) -> str:
    asyncio.run(ask(endpoint))
    sys.exit(3)


def runs_out_of_items_in_its_thread(task: MCPTask, endpoint: AgentEndpoint) -> str:
    asyncio.run(ask(endpoint))
    raise StopIteration


async def awaits_a_task_that_it_cancelled(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    asking = asyncio.ensure_future(asyncio.Event().wait())
    asking.cancel()
    return str(await asking)


def is_interrupted_in_its_thread(task: MCPTask, endpoint: AgentEndpoint) -> str:
    asyncio.run(ask(endpoint))
    raise KeyboardInterrupt


def is_cancelled_in_its_thread(task: MCPTask, endpoint: AgentEndpoint) -> str:
    return asyncio.run(awaits_a_task_that_it_cancelled(task, endpoint))


class BlocksItsLoop:
    async def __call__(self, task: MCPTask, endpoint: AgentEndpoint) -> str | None:
        return await blocks_its_loop(task, endpoint)


def returns_what_blocks_its_loop(task: MCPTask, endpoint: AgentEndpoint) -> Any:
    return blocks_its_loop(task, endpoint)


async def never_stops(task: MCPTask, endpoint: AgentEndpoint) -> str:
    while True:
        await ask(endpoint)


async def waits_for_ever(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    await asyncio.Event().wait()
    return "never"


@pytest.mark.parametrize(
    ("agent", "rollout", "result", "detail"),
    [
        (answers, {}, RolloutResult("answered", "7"), ""),
        (answers_in_its_own_words, {}, RolloutResult("answered", "7"), ""),
        *(
            (agent, {"rollout_timeout_seconds": 20.0}, RolloutResult("answered", "7"), "")
            for agent in (blocks_its_loop, BlocksItsLoop(), returns_what_blocks_its_loop)
        ),
        (gives_up, {}, RolloutResult("no_answer"), "no_answer"),
        (
            chokes_on_the_reply,
            {},
            RolloutResult("agent_error"),
            "agent_error: ValueError: no JSON: <answer>7</answer> (tests/unit/rollout/agent/test_agent_sampler.py:",
        ),
        *(
            (
                agent,
                {"rollout_timeout_seconds": 20.0},
                RolloutResult("agent_error"),
                "agent_error: UserCodeError: the agent exited the program (3) instead of returning",
            )
            for agent in (ends_the_program, ends_the_program_in_its_thread)
        ),
        (
            runs_out_of_items_in_its_thread,
            {"rollout_timeout_seconds": 20.0},
            RolloutResult("agent_error"),
            "agent_error: RuntimeError: the agent raised StopIteration()",
        ),
        (
            is_interrupted_in_its_thread,
            {"rollout_timeout_seconds": 20.0},
            RolloutResult("agent_error"),
            "agent_error: RuntimeError: the agent raised KeyboardInterrupt()",
        ),
        *(
            (
                agent,
                {"rollout_timeout_seconds": 20.0},
                RolloutResult("agent_error"),
                "agent_error: UserCodeError: the agent raised CancelledError",
            )
            for agent in (awaits_a_task_that_it_cancelled, is_cancelled_in_its_thread)
        ),
        (never_stops, {"max_turns": 2}, RolloutResult("turns_limit"), "PermissionDeniedError"),
        (
            waits_for_ever,
            {"rollout_timeout_seconds": 3.0},
            RolloutResult("time_limit"),
            "time_limit",
        ),
    ],
)
async def test_every_end_of_an_agent_has_its_own_outcome(
    store: TrajectoryStore,
    renderer: Renderer,
    agent: Any,
    rollout: dict[str, Any],
    result: RolloutResult,
    detail: str,
) -> None:
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine, rollout=RolloutSection(**rollout)) as stage:
            with AgentThread.open() as agents:
                sampler, record = await stage.sampler(agents.wrapped(agent))
                assert await sampler.run() == result
            score = await sampler.evaluate_record(result)
    assert len(await store.turns.of_record(record.id)) == rollout.get("max_turns", 1)
    assert score.value == (1.0 if result.outcome == "answered" else 0.0)
    assert detail in score.detail


def test_agents_that_run_in_other_processes_stay_on_the_samplers_loop() -> None:
    program = configured_agent(
        RootConfig(agents=AgentSection(agent_command=f"{sys.executable} -c pass {{query}}"))
    )
    with AgentThread.open() as agents:
        assert agents.wrapped(program) is program
        assert agents.wrapped(answers) is not answers


async def test_an_agent_that_is_cancelled_ends_before_its_caller_goes_on() -> None:
    steps: list[str] = []
    begun = threading.Event()

    async def tidies_up(task: MCPTask, endpoint: AgentEndpoint) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            steps.append("tidied up")
        return "never"

    with AgentThread.open() as agents:
        endpoint = AgentEndpoint("http://127.0.0.1:1/v1", "policy", "key")
        play: Any = agents.wrapped(tidies_up)
        playing = asyncio.ensure_future(play(TASK, endpoint))
        await asyncio.to_thread(begun.wait)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert steps == ["tidied up"]


async def outage_behind_it(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    try:
        raise ConnectionRefusedError("the web shop is down")
    except ConnectionRefusedError as error:
        raise RuntimeError("my tool failed") from error


async def fails_before_it_asks(task: MCPTask, endpoint: AgentEndpoint) -> str:
    raise KeyError("a bug")


async def returns_no_text(task: MCPTask, endpoint: AgentEndpoint) -> Any:
    return {"answer": await ask(endpoint)}


async def never_asks(task: MCPTask, endpoint: AgentEndpoint) -> str:
    return "7"


async def asks_for_two_answers(task: MCPTask, endpoint: AgentEndpoint) -> str:
    return await ask(endpoint) + await ask(endpoint, "again", n=2)


async def asks_twice(task: MCPTask, endpoint: AgentEndpoint) -> str:
    return await ask(endpoint) + await ask(endpoint, "think long")


async def sets_up() -> None:
    """Take no longer than it takes to call this."""


async def saves_nothing(_: AgentEndpoint) -> None:
    """Have no snapshots."""


async def test_an_environment_that_hangs_is_no_failure_of_the_policy(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    task = TASK.model_copy(update={"num_generations": 2})
    limits = RolloutSection(rollout_timeout_seconds=2.0)

    def reply(prompt: str) -> str:
        time.sleep(2.5 if "think long" in prompt else 0.0)
        return "<answer>7</answer>"

    with serve_script(renderer, reply) as engine:
        await begin_run(store, engine, task)
        async with open_stage(store, engine, rollout=limits) as stage:
            ends: list[Any] = []
            for agent in (waits_for_ever, asks_twice):
                record, _ = await claim(store)
                sampler = EnvironmentSampler(
                    ENVIRONMENT_TASK,
                    record,
                    stage.context,
                    set_up=sets_up,
                    agent=agent,
                    save=saves_nothing,
                    endpoints=stage.endpoints,
                )
                due = sampler.deadline
                try:
                    ends.append(await sampler.run())
                except AgentError as error:
                    ends.append(str(error))
                assert sampler.deadline > due  # the time of the set-up is not the rollout's
                await sampler.discard()
    assert "waits_for_ever was still running when the rollout timed out" in ends[0]
    assert ends[1] == RolloutResult("time_limit")


async def loses_its_game(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
    return AgentResult(await ask(endpoint), reward=0.0, error="the game server is full")


async def rewards_a_call_that_was_not_made(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
    return AgentResult(await ask(endpoint), step_rewards=(0.5, 0.5))


async def rewards_nothing_finite(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
    return AgentResult(await ask(endpoint), reward=float("nan"))


async def hides_a_refusal(task: MCPTask, endpoint: AgentEndpoint) -> str:
    await ask(endpoint)
    try:
        return await ask(AgentEndpoint(endpoint.base_url, "gpt-5", endpoint.api_key), "again")
    except openai.NotFoundError:
        return "something went wrong"


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (never_asks, "without calling the policy"),
        (asks_for_two_answers, "refused a call: n: must be 1"),
        (hides_a_refusal, "refused a call: the model 'gpt-5' is not served here"),
        (outage_behind_it, "RuntimeError: my tool failed"),
        (fails_before_it_asks, "KeyError: 'a bug'"),
        (returns_no_text, "the agent returned dict"),
        (loses_its_game, "the agent ended the attempt: the game server is full"),
        (rewards_a_call_that_was_not_made, "2 step_rewards for 1 policy calls"),
        (rewards_nothing_finite, "reward is nan, not a finite number"),
    ],
)
async def test_what_is_not_the_policys_doing_ends_the_attempt_and_is_not_scored(
    store: TrajectoryStore, renderer: Renderer, agent: Any, reason: str
) -> None:
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            sampler, _ = await stage.sampler(agent)
            with pytest.raises(AgentError, match=reason):
                await sampler.run()


async def rewards_itself(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
    await ask(endpoint)
    await ask(endpoint, "again")
    return AgentResult("8", reward=-0.5, step_rewards=(None, 0.25), metrics={"a.b": 2, "$c": 1.0})


async def test_an_agents_own_reward_is_the_score_and_its_figures_stay_with_the_record(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            sampler, record = await stage.sampler(rewards_itself)
            attempt = RolloutAttempt(
                TASK,
                record,
                stage.context,
                lambda *_: sampler,
                SlotCounts(),
                on_generated=lambda: None,
            )
            await attempt.start()
    stored = await store.records.get(record.id)
    assert stored is not None
    assert (stored.status, stored.reward, stored.metrics) == (
        *("scored", -0.5),
        {"a.b": 2.0, "$c": 1.0},
    )
    assert stored.score is not None
    assert (stored.score.scorer, stored.score.value) == ("rewards_itself", -0.5)
    assert [turn.reward for turn in await store.turns.of_record(record.id)] == [None, 0.25]


async def test_a_reward_outlives_the_process_that_was_to_score_it(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        elsewhere = RolloutSection(scoring="elsewhere")
        async with open_stage(store, engine, rollout=elsewhere) as stage:
            sampler, record = await stage.sampler(rewards_itself)
            context = stage.context
            counts = SlotCounts()
            attempt = RolloutAttempt(
                TASK, record, context, lambda *_: sampler, counts, on_generated=lambda: None
            )
            await attempt.start()
            claimed = await store.scores.claim("another", 30)
            assert claimed is not None
            again, task = claimed
            scorer = AgentSampler(
                TASK, again, context, agent=rewards_itself, endpoints=stage.endpoints
            )
            late = RolloutAttempt(
                task, again, context, lambda *_: scorer, counts, on_generated=lambda: None
            )
            await late.start(scoring_only=True)
    stored = await store.records.get(record.id)
    assert stored is not None
    assert stored.score is not None
    assert (stored.score.value, stored.metrics["a.b"]) == (-0.5, 2.0)


async def cuts_the_episode_short(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
    return AgentResult(await ask(endpoint), reward=0.0, truncated=True)


async def test_an_episode_that_was_cut_short_ends_at_a_limit_with_its_reward(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, _ = await stage.play(cuts_the_episode_short)
    assert result == RolloutResult("turns_limit", "7", reward=0.0)


async def test_an_agent_may_try_something_else_after_a_refusal(
    store: TrajectoryStore, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    async def probes(task: MCPTask, endpoint: AgentEndpoint) -> str:
        with pytest.raises(openai.BadRequestError):
            await ask(endpoint, n=2)
        return await ask(endpoint)

    task = TASK.model_copy(update={"num_generations": 2})
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, task)
        async with open_stage(store, engine) as stage:
            played = [await stage.play(probes) for _ in range(2)]
    assert [result for result, _ in played] == [RolloutResult("answered", "7")] * 2
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text for text in said if "n: must be 1" in text] == said
    assert len(said) == 1


async def test_a_plain_function_may_block_its_thread_without_holding_up_the_others(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    def blocks(task: MCPTask, endpoint: AgentEndpoint) -> str:
        return asyncio.run(ask(endpoint))

    task = TASK.model_copy(update={"num_generations": 3})
    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, task)
        async with open_stage(store, engine) as stage:
            played = await asyncio.gather(*(stage.play(blocks) for _ in range(3)))
    assert [result for result, _ in played] == [RolloutResult("answered", "7")] * 3


async def test_an_agent_is_found_in_a_file_beside_its_neighbours(tmp_path: Any) -> None:
    (tmp_path / "agent_neighbour.py").write_text("ANSWER = '7'\n")
    (tmp_path / "mine.py").write_text(
        "from agent_neighbour import ANSWER\n\ndef play(task, endpoint):\n    return ANSWER\n"
    )
    assert load_agent(f"{tmp_path}/mine.py:play")(TASK, AgentEndpoint("", "", "")) == "7"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:play", "nowhere.py:play: no such file"),
        ("json:play", "json has no attribute 'play'"),
        ("json:__name__", "'json' is not a function"),
        ("json:dumps_", "json has no attribute 'dumps_'"),
        ("math:sqrt", r"an agent is called with \(task, endpoint\)"),
        ("nobody", "no such entry point"),
        ("no.such.module:play", "ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_the_name_of_an_agent_costs_one_line(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_agent(name)
    assert "\n" not in str(caught.value)


async def test_the_key_of_a_session_is_not_shown(store: TrajectoryStore) -> None:
    endpoint = AgentEndpoint("http://127.0.0.1:1/s/x/v1", "m", "sk-secret")
    assert "sk-secret" not in repr(endpoint)


async def test_a_failed_model_call_that_nobody_made_good_is_no_score(
    store: TrajectoryStore, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.inference.client.pool._RETRY_SECONDS", (0.01,))

    async def shrugs(task: MCPTask, endpoint: AgentEndpoint) -> str:
        await ask(endpoint, "first")
        engine.down = True
        try:
            return await ask(endpoint, "second")
        except openai.InternalServerError:
            return "7"

    with serve_script(renderer, lambda prompt: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            sampler, _ = await stage.sampler(shrugs)
            with pytest.raises(InferenceError):
                await sampler.run()

"""Agents of one rollout, told apart by the header of their calls: their turns, and what they earn."""

import asyncio
from typing import Any
from urllib.parse import quote

import openai
import pytest
from harness.scripted_engine import serve_script
from support.agents import assert_prompts_as_sent, open_stage
from support.play import begin_run

from agentrl.config.sections import RolloutSection
from agentrl.errors import AgentError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.agent import AgentEndpoint
from agentrl.rollout.agent.agent_sampler import AgentSampler
from agentrl.rollout.async_sampler import RolloutResult
from agentrl.rollout.worker.attempt import RolloutAttempt, SlotCounts
from agentrl.schema import (
    AgentResult,
    DispatchedSamplingTask,
    MCPTask,
    Seat,
    SeatResult,
)
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="Your move?", num_generations=1, answer="7")


async def ask(endpoint: AgentEndpoint, seat: str, *later: str, stint: str = "") -> None:
    """Ask the policy as a seat, and go on with what it says."""
    headers = {"X-AgentRL-Seat": quote(seat, safe="")} | ({"X-Session-ID": stint} if stint else {})
    messages: list[Any] = [{"role": "user", "content": TASK.query}]
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, default_headers=headers
    ) as client:
        for more in (*later, None):
            completion = await client.chat.completions.create(
                model=endpoint.model, messages=messages
            )
            reply = {"role": "assistant", "content": completion.choices[0].message.content}
            messages += [reply, {"role": "user", "content": more}]


async def played(
    store: TrajectoryStore, renderer: Renderer, agent: Any, **options: Any
) -> tuple[RolloutResult, list[DispatchedSamplingTask]]:
    with serve_script(renderer, lambda prompt: "hm", delay_seconds=0.02) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine, **options) as stage:
            result, turns = await stage.play(agent)
    assert_prompts_as_sent(turns, [body["input_ids"] for body in engine.requests])
    return result, turns


async def test_seats_that_say_the_same_at_once_are_trees_of_their_own(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        await asyncio.gather(*(ask(endpoint, seat, "go on") for seat in ("a", "b")))
        return AgentResult("x", 0.5, seats=[SeatResult("a", 1.0), SeatResult("b", 0.0)])

    _, turns = await played(store, renderer, agent)
    of_seat: dict[str, list[DispatchedSamplingTask]] = {"a": [], "b": []}
    for turn in turns:
        assert turn.seat is not None
        of_seat[turn.seat.name].append(turn)
    for name, reward in (("a", 1.0), ("b", 0.0)):
        first, second = of_seat[name]
        assert (first.parent, second.parent) == (None, first.index)
        assert first.seat == second.seat == Seat(name=name, reward=reward)


async def test_stints_of_one_seat_are_told_apart_and_one_that_was_given_up_is_not_trained(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        for stint in ("f00", "ba4", "f00"):
            await ask(endpoint, "solver", stint=stint)
        seats = [SeatResult("solver", 1.0, "f00"), SeatResult("solver", stint="ba4", trained=False)]
        return AgentResult("x", 1.0, seats=seats)

    _, turns = await played(store, renderer, agent)
    assert [turn.seat for turn in turns] == [
        Seat(name="solver", reward=1.0),
        Seat(name="solver", stint=1, trained=False),
        Seat(name="solver", reward=1.0),
    ]


async def test_a_session_id_alone_makes_no_seat(store: TrajectoryStore, renderer: Renderer) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            default_headers={"X-Session-ID": "1"},
        ) as client:
            await client.completions.create(model=endpoint.model, prompt="hm")
        return "x"

    _, turns = await played(store, renderer, agent)
    assert [turn.seat for turn in turns] == [None]


async def test_odd_names_stay_what_they_are_and_seats_without_calls_are_no_trouble(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    names = ["a.b", "$set", "größte Ärztin", "x" * 100, "a/b c%20"]

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        for name in names:
            await ask(endpoint, name)
        seats = [SeatResult(name, float(n)) for n, name in enumerate([*names, "silent"])]
        metrics = {f"reward_{name}": 1.0 for name in names}
        return AgentResult("x", 1.0, seats=seats, metrics=metrics)

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            sampler, record = await stage.sampler(agent)
            attempt = RolloutAttempt(
                *(TASK, record, stage.context, lambda *_: sampler, SlotCounts()),
                on_generated=lambda: None,
            )
            await attempt.start()
    stored = await store.records.get(record.id)
    assert stored is not None
    assert set(stored.metrics) == {f"reward_{name}" for name in names}
    assert stored.score is not None
    assert (stored.score.value, stored.score.seats_keep_rewards) == (1.0, True)
    assert [turn.seat for turn in await store.turns.of_record(record.id)] == [
        Seat(name=name, reward=float(n)) for n, name in enumerate(names)
    ]


async def test_a_hundred_seats_speak_at_once(store: TrajectoryStore, renderer: Renderer) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        await asyncio.gather(*(ask(endpoint, f"seat {n}") for n in range(100)))
        return AgentResult("x", 1.0, seats=[SeatResult(f"seat {n}", float(n)) for n in range(100)])

    _, turns = await played(store, renderer, agent, rollout=RolloutSection(max_turns=100))
    rewards = {turn.seat.name: turn.seat.reward for turn in turns if turn.seat is not None}
    assert rewards == {f"seat {n}": float(n) for n in range(100)}
    assert {turn.parent for turn in turns} == {None}


async def test_a_limit_leaves_every_seat_with_the_score_of_the_rollout(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        await ask(endpoint, "a")
        await ask(endpoint, "b", "go on")
        raise AssertionError("the second call of b is refused")

    result, turns = await played(store, renderer, agent, rollout=RolloutSection(max_turns=2))
    assert result == RolloutResult("turns_limit")
    assert [turn.seat for turn in turns] == [Seat(name="a"), Seat(name="b")]


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ([SeatResult("b", 1.0)], "the seat 'a' made calls, but the agent returned no result"),
        ([SeatResult("a", 1.0, stint="1")], "the seat 'a' made calls, but the agent returned no"),
        ([SeatResult("a", float("nan"))], "the agent's reward of seat 'a' is nan, not a finite"),
        ([SeatResult("a", "high")], "the agent's reward of seat 'a' is a str"),  # type: ignore[arg-type]
        ([{"name": "a"}], "the agent's seats contain a dict, not a SeatResult"),
        ([SeatResult("a")] * 1001, "the agent returned more than 1,000 seats"),
        (None, "the agent's seats is a NoneType, not a Iterable"),
    ],
)
async def test_a_result_that_says_nothing_of_a_seat_ends_the_attempt(
    store: TrajectoryStore, renderer: Renderer, seats: Any, problem: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        await ask(endpoint, "a")
        return AgentResult("x", 1.0, seats=seats)

    with pytest.raises(AgentError, match=problem):
        await played(store, renderer, agent)


@pytest.mark.parametrize(("seat", "stint"), [("x" * 101, ""), ("", "1"), ("a", "x" * 101)])
async def test_a_name_that_cannot_be_is_refused(
    store: TrajectoryStore, renderer: Renderer, seat: str, stint: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        with pytest.raises(openai.BadRequestError, match="the name of a seat has 1 to 100 char"):
            await ask(endpoint, seat, stint=stint)
        await ask(endpoint, "a")
        return "x"

    _, turns = await played(store, renderer, agent)
    assert [turn.seat for turn in turns] == [Seat(name="a")]


async def test_a_reward_is_scored_for_the_seats_by_a_process_that_did_not_play(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        await ask(endpoint, "a")
        return AgentResult("x", 0.5, seats=[SeatResult("a", 1.0)])

    with serve_script(renderer, lambda prompt: "hm") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            sampler, record = await stage.sampler(agent)
            await sampler.run()
            await sampler.finish()
            other = AgentSampler(
                TASK, record, stage.context, agent=agent, endpoints=stage.endpoints
            )
            score = await other.evaluate_record(RolloutResult("answered", "x", 0.5))
    assert score.seats_keep_rewards
    (turn,) = await store.turns.of_record(record.id)
    assert turn.seat == Seat(name="a", reward=1.0)

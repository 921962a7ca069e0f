"""Replies that reach the agent while they are sampled."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import openai
import pytest
from harness.scripted_engine import serve_script
from hypothesis import strategies as st
from support.agents import assert_prompts_as_sent, client_of, open_stage
from support.fuzzing import TryCases
from support.play import begin_run, tool_call

from agentrl.errors import AgentError, StoreError
from agentrl.inference.dialects.dialect import Remainder
from agentrl.inference.dialects.session import DELTA_KINDS, Delta
from agentrl.renderers import Renderer, Reply
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint, reply_delivery
from agentrl.rollout.agent.reply_delivery import DeltaStream, as_delivered
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")
REPLY = "<think>Let me think. And again.</think>The answer is near: <answer>7</answer>"
WORDS = "The answer is near: <answer>7</answer>"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every token, however fast they come."""
    monkeypatch.setattr(reply_delivery, "_MIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(reply_delivery, "_PAUSE_PER_PARSE", 0)


def test_a_reply_that_takes_long_to_parse_is_parsed_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_delivery, "_PAUSE_PER_PARSE", 9)
    clock, num_readings = 0.0, 0

    def parse(ids: np.ndarray) -> Reply:
        nonlocal clock, num_readings
        clock, num_readings = clock + 1.0, num_readings + 1
        return Reply(text="x", content="x", reasoning="", tool_calls=())

    monkeypatch.setattr("agentrl.rollout.agent.reply_delivery.time.monotonic", lambda: clock)
    stream = DeltaStream(parse, lambda delta: None)
    for _ in range(40):
        stream.update(np.array([1]))
        clock += 0.5
    assert num_readings == 3  # of one second each, in 23 seconds


async def chat(client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> AsyncIterator[str]:
    frames = await client.chat.completions.create(
        model=endpoint.model, messages=[{"role": "user", "content": TASK.query}], stream=True
    )
    async for frame in frames:
        yield frame.choices[0].delta.content or ""


async def responses(client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> AsyncIterator[str]:
    async with client.responses.stream(model=endpoint.model, input=TASK.query) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                yield event.delta
        whole = await events.get_final_response()
    assert whole.output_text == WORDS
    assert [item.type for item in whole.output] == ["reasoning", "message"]


async def completions(client: openai.AsyncOpenAI, endpoint: AgentEndpoint) -> AsyncIterator[str]:
    frames = await client.completions.create(
        model=endpoint.model, prompt="What? ", max_tokens=100, stream=True
    )
    async for frame in frames:
        yield frame.choices[0].text


Ask = Callable[[openai.AsyncOpenAI, AgentEndpoint], AsyncIterator[str]]


@pytest.mark.parametrize(
    ("ask", "expected"), [(chat, WORDS), (responses, WORDS), (completions, REPLY)]
)
async def test_words_arrive_while_the_reply_goes_on_and_its_end_when_it_is_stored(
    store: TrajectoryStore, renderer: Renderer, ask: Ask, expected: str
) -> None:
    hold = threading.Event()

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        said = ""
        async with client_of(endpoint) as client:
            async for words in ask(client, endpoint):
                said += words
                if words and not hold.is_set():
                    assert await store.turns.of_record("train/0/q1/0") == []
                    hold.set()
        assert said == expected
        assert len(await store.turns.of_record("train/0/q1/0")) == 1
        return "7"

    with serve_script(renderer, lambda _: REPLY, hold=hold) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert_prompts_as_sent(turns, [body["input_ids"] for body in engine.requests])


@pytest.mark.parametrize("ask", [chat, responses, completions])
async def test_a_turn_that_cannot_be_stored_ends_the_stream_with_an_error_and_scores_nothing(
    store: TrajectoryStore, renderer: Renderer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise StoreError("the store is away")

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async def read(client: openai.AsyncOpenAI) -> list[str]:
            return [words async for words in ask(client, endpoint)]

        async with client_of(endpoint) as client:
            with pytest.raises(openai.APIError, match="the store is away"):
                await read(client)
        return "7"

    with serve_script(renderer, lambda _: REPLY) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            monkeypatch.setattr(store.turns, "append", fails)
            with pytest.raises(StoreError, match="the store is away"):
                await stage.play(agent)


async def test_a_client_that_leaves_a_stream_leaves_no_turn(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            async for words in chat(client, endpoint):
                if words:
                    break
        return "7"

    hold = threading.Event()
    with serve_script(renderer, lambda _: REPLY, hold=hold) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match="without calling the policy"):
                await stage.play(agent)
        hold.set()
    assert await store.database["turns"].count_documents({}) == 0


PIECES = (
    *("The ", "lamp", " ", "\n", "é台", "a < b [c] {d}", "END", "EN", "<answer>7</answer>"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "{broken", tool_call("look", key="é")),
)


@pytest.mark.parametrize(
    "text", ["<think>hm</think>Well, so.", "well </think> then", " <think>hm</think> \n so"]
)
def test_what_was_told_of_thinking_stays(renderer: Renderer, text: str) -> None:
    check_what_was_told(renderer, text, may_call=True)


@pytest.mark.fuzz(150)
def test_what_was_told_of_stays_whatever_follows(renderer: Renderer, try_cases: TryCases) -> None:
    texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
    try_cases(
        lambda text, may_call: check_what_was_told(renderer, text, may_call=may_call),
        text=texts,
        may_call=st.booleans(),
    )


def check_what_was_told(renderer: Renderer, text: str, *, may_call: bool) -> None:
    ids = np.append(renderer.sampled_ids(text), renderer.stop_token_ids[0])
    stop = ("END",)
    sent: list[Delta] = []
    stream = DeltaStream(renderer.parse, sent.append, stop=stop, calls_may_lead=may_call)
    for size in range(1, len(ids)):
        stream.update(ids[:size])
    final = as_delivered(renderer.parse(ids), may_call=may_call, stop=stop)
    whole = stream.whole(final)
    remainder = Remainder()
    for delta in sent:
        remainder.count(delta)
    for kind in DELTA_KINDS:
        parts = [*sent, *remainder.of(whole)]
        assert "".join(part.text for part in parts if part.kind == kind) == whole.get(kind, "")
    if "think>" not in text:  # thinking that begins or ends late makes other words of earlier ones
        assert whole == final
    assert whole.get("tool_calls") == final.get("tool_calls")

"""Anthropic's own client against the agent endpoint, before an engine that keeps what it was sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from harness.scripted_engine import ScriptedEngine, replies, serve_script
from support.agents import MODEL, assert_prompts_as_sent, open_stage
from support.play import begin_run, tool_call

from agentrl.config.sections import AgentSection
from agentrl.errors import AgentError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", num_generations=2, answer="7")
CALL = f"<think>look it up</think>Let me see.\n{tool_call('look', key='lamp')}"
ANSWER = "<answer>7</answer>"
LOOK: Any = {
    "name": "look",
    "description": "Looks a price up.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}},
}
USER: Any = [{"role": "user", "content": TASK.query}]


def sent(engine: ScriptedEngine) -> list[list[int]]:
    return [body["input_ids"] for body in engine.requests]


@asynccontextmanager
async def claude(endpoint: AgentEndpoint) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        yield client


async def answer_of(client: anthropic.AsyncAnthropic, stream: bool, **asked: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 100, **asked}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_written_for_claude_continues_the_sampled_tokens(
    store: TrajectoryStore, renderer: Renderer, stream: bool
) -> None:
    kinds: list[list[str]] = []

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [*USER]
        async with claude(endpoint) as client:
            while True:
                asked: Any = {"system": "Be brief.", "messages": messages, "tools": [LOOK]}
                counted = await client.messages.count_tokens(model=MODEL, **asked)
                reply = await answer_of(client, stream, **asked)
                kinds.append([block.type for block in reply.content])
                usage = reply.usage
                assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
                if reply.stop_reason != "tool_use":
                    assert reply.stop_reason == "end_turn"
                    return str(reply.content[-1].text)
                call = reply.content[-1]
                assert (call.name, call.input) == ("look", {"key": "lamp"})
                result = {"type": "tool_result", "tool_use_id": call.id, "content": "7 coins"}
                back = [block.model_dump(exclude_none=True) for block in reply.content]
                messages += [
                    {"role": "assistant", "content": back},
                    {"role": "user", "content": [result]},
                ]

    with serve_script(renderer, replies(CALL, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    assert kinds == [["thinking", "text", "tool_use"], ["text"]]
    first, second = turns
    assert (second.parent, second.branch_reason) == (0, None)
    assert second.shared_len == len(sent(engine)[0]) + len(first.output_ids)
    assert [(r.name, r.content) for r in first.tool_results] == [("look", "7 coins")]
    assert_prompts_as_sent(turns, sent(engine))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_ends_the_reply_and_is_named(
    store: TrajectoryStore, renderer: Renderer, stream: bool
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with claude(endpoint) as client:
            # Fields that the client does not know any more, and agents still send.
            more = {"temperature": 0.5, "top_k": 3}
            reply = await answer_of(
                client, stream, messages=USER, stop_sequences=["END"], extra_body=more
            )
            assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
            return str(reply.content[0].text)

    with serve_script(renderer, lambda _: "sevenEND and more") as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, _ = await stage.play(agent)
    assert result.final_answer == "seven"
    assert engine.requests[0]["sampling_params"]["stop"] == ["END"]
    assert engine.requests[0]["sampling_params"]["top_k"] == 3


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"model": "claude-opus-9"}, anthropic.NotFoundError, "served: train-model"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "It is"}]},
            anthropic.BadRequestError,
            "cannot be prefilled",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "run on Anthropic's servers",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            anthropic.BadRequestError,
            "'video' is not supported",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, anthropic.BadRequestError, "list"),
        ({"extra_body": {"mcp_servers": [{}]}}, anthropic.BadRequestError, "mcp_servers"),
        (
            {
                "extra_body": {
                    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}
                }
            },
            anthropic.BadRequestError,
            "'clear_tool_uses_20250919' is not supported",
        ),
        ({"extra_body": {"context_management": 7}}, anthropic.BadRequestError, "list of objects"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError, "'x'"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_in_anthropics_form(
    store: TrajectoryStore,
    renderer: Renderer,
    asked: dict[str, Any],
    error: type[anthropic.APIStatusError],
    why: str,
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with claude(endpoint) as client:
            with pytest.raises(error) as refused:
                await answer_of(client, False, **{"messages": USER, **asked})
        body: Any = refused.value.body
        assert body["type"] == "error"
        assert why in body["error"]["message"]
        assert "\n" not in body["error"]["message"]
        return "7"

    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            # The refusal is the agent's own: it ends the attempt, and nothing is scored.
            with pytest.raises(AgentError, match="refused a call"):
                await stage.play(agent)
    assert engine.requests == []


async def test_the_wrong_key_and_the_wrong_address_are_told(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        twice = anthropic.AsyncAnthropic(base_url=endpoint.base_url, api_key=endpoint.api_key)
        async with twice, claude(endpoint) as client:
            with pytest.raises(anthropic.NotFoundError, match="add /v1"):
                await answer_of(twice, False, messages=USER)
            return str((await answer_of(client, False, messages=USER)).content[0].text)

    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert (result.final_answer, len(turns)) == ("7", 1)


@pytest.mark.parametrize("sampling", ["agent", "run"])
async def test_a_schema_of_output_config_holds_the_reply(
    store: TrajectoryStore, renderer: Renderer, sampling: Any
) -> None:
    schema = {"type": "object", "properties": {"coins": {"type": "integer"}}}

    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        async with claude(endpoint) as client:
            reply = await answer_of(client, False, messages=USER, output_config=form)
            return str(reply.content[0].text)

    with serve_script(renderer, lambda _: '{"coins": 7}') as engine:
        await begin_run(store, engine, TASK)
        section = AgentSection(agent_sampling=sampling)
        async with open_stage(store, engine, agents=section) as stage:
            result, _ = await stage.play(agent)
    assert result.final_answer == '{"coins": 7}'
    assert "coins" in engine.requests[0]["sampling_params"]["json_schema"]

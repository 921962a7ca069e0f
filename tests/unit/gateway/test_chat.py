"""OpenAI's own client against the gateway, before an engine that keeps what it was sent."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.agents import LOOK, assert_prompts_as_sent, client_of, open_stage
from support.play import begin_run, tool_call
from support.scripted_engine import ScriptedEngine, serve_script

from agentrl.gateway import AgentEndpoint
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", num_generations=2, answer="7")
CALL = f"<think>look it up</think>Let me see.\n{tool_call('look', key='lamp')}"
ANSWER = "<answer>7</answer>"


def replies(*texts: str) -> Callable[[str], str]:
    """A script that gives these replies one after the other, the last one for ever."""
    asked = itertools.count()
    return lambda prompt: texts[min(next(asked), len(texts) - 1)]


def sent(engine: ScriptedEngine) -> list[list[int]]:
    return [body["input_ids"] for body in engine.requests]


def as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


def as_another_framework_would(message: dict[str, Any]) -> dict[str, Any]:
    """No thinking, ids of its own, other spaces in the arguments, no words beside the calls."""
    calls = [
        {
            "id": f"own-{position}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=4),
            },
        }
        for position, call in enumerate(message["tool_calls"])
    ]
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let me see."}],
        "tool_calls": calls,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send_back", [as_it_is, as_another_framework_would])
async def test_the_next_call_continues_the_sampled_tokens_however_the_reply_is_sent_back(
    store: TrajectoryStore,
    renderer: Renderer,
    stream: bool,
    send_back: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with client_of(endpoint) as client:
            while True:
                ask: dict[str, Any] = {
                    "model": endpoint.model,
                    "messages": messages,
                    "tools": [LOOK],
                }
                if stream:
                    async with client.chat.completions.stream(**ask) as events:
                        completion = await events.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**ask)
                choice = completion.choices[0]
                if not choice.message.tool_calls:
                    assert choice.finish_reason == "stop"
                    return choice.message.content or ""
                assert choice.finish_reason == "tool_calls"
                reply = send_back(choice.message.model_dump(exclude_none=True))
                call = reply["tool_calls"][0]
                assert json.loads(call["function"]["arguments"]) == {"key": "lamp"}
                messages += [
                    reply,
                    {"role": "tool", "tool_call_id": call["id"], "content": "7 coins"},
                ]

    with serve_script(renderer, replies(CALL, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    first, second = turns
    assert (first.parent, second.parent, second.branch_reason) == (None, 0, None)
    assert second.shared_len == len(sent(engine)[0]) + len(first.output_ids)
    assert [(r.call_id, r.name, r.content) for r in first.tool_results] == [
        (first.tool_calls[0].id, "look", "7 coins")
    ]
    assert second.added_messages == ()
    assert [tool["function"]["name"] for tool in first.tools] == ["look"]
    assert_prompts_as_sent(turns, sent(engine))

"""Calls that the agent says must be made."""

from typing import Any

import openai
import pytest
from harness.scripted_engine import serve_script
from support.agents import LOOK, assert_prompts_as_sent, client_of, open_stage
from support.play import begin_run

from agentrl.errors import AgentError
from agentrl.renderers import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import AgentEndpoint
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")
OTHER = {"type": "function", "function": {"name": "buy"}}
NAMED = {"type": "function", "function": {"name": "look"}}
BEGUN = '<|im_start|>assistant\n<tool_call>\n{"name":'


def go_on(prompt: str) -> str:
    """Make a call of the beginning of one; say the answer otherwise."""
    rest = ' {"key": "lamp"}}\n</tool_call>'
    if prompt.endswith(BEGUN):
        return ' "look", "arguments":' + rest
    return rest if prompt.endswith(f'{BEGUN} "look", "arguments":') else "<answer>7</answer>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "choice"),
    [([LOOK, OTHER], "required"), ([LOOK], "required"), ([OTHER, LOOK], NAMED)],
)
async def test_a_required_call_is_begun_for_the_policy_and_only_its_own_tokens_are_its_own(
    store: TrajectoryStore, renderer: Renderer, tools: list[Any], choice: Any, stream: bool
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        async with client_of(endpoint) as client:
            ask: dict[str, Any] = {"model": endpoint.model, "messages": messages, "tools": tools}
            if stream:
                async with client.chat.completions.stream(**ask, tool_choice=choice) as events:
                    completion: Any = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(**ask, tool_choice=choice)
            message = completion.choices[0].message
            (call,) = message.tool_calls
            assert (call.function.name, call.function.arguments) == ("look", '{"key": "lamp"}')
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
            completion = await client.chat.completions.create(**ask)
        return completion.choices[0].message.content or ""

    with serve_script(renderer, go_on) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    first, second = turns
    sampled = renderer.decode(first.output_ids)
    assert first.output_text.startswith('<tool_call>\n{"name":')
    assert first.output_text.endswith(sampled.removesuffix("<|im_end|>"))
    assert "<tool_call>" not in sampled
    assert (second.parent, second.branch_reason) == (0, None)
    assert second.shared_len == len(first.added_ids) + len(first.output_ids)
    assert_prompts_as_sent(turns, [body["input_ids"] for body in engine.requests])


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        (
            [LOOK],
            {"type": "function", "function": {"name": "buy"}},
            "the request's tools have no 'buy'",
        ),
        ([], "required", "the request has no tools to call"),
        ([LOOK], "sometimes", "use none, auto, required or a function"),
        ([{"type": "function", "function": {"name": "<|im_end|>"}}], "required", "control token"),
    ],
)
async def test_a_choice_that_cannot_be_had_is_refused(
    store: TrajectoryStore, renderer: Renderer, tools: list[Any], choice: Any, expected: str
) -> None:
    async def agent(task: MCPTask, endpoint: AgentEndpoint) -> str:
        async with client_of(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match=expected):
                await client.chat.completions.create(
                    model=endpoint.model,
                    messages=[{"role": "user", "content": task.query}],
                    tools=tools,
                    tool_choice=choice,
                )
        return "7"

    with serve_script(renderer, go_on) as engine:
        await begin_run(store, engine, TASK)
        async with open_stage(store, engine) as stage:
            with pytest.raises(AgentError, match=r"refused a call|without calling the policy"):
                await stage.play(agent)
    assert await store.database["turns"].count_documents({}) == 0

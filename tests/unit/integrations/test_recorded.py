"""Calls answered token by token, with the demo's chat template."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError
from agentrl.integrations.agent_worker.recorded_rollout import RecordedRollout, Sampled
from agentrl.renderers import Renderer

MODEL = Path(__file__).parents[3] / "assets/demo/model"
CALL = '<tool_call>\n{"name": "stock", "arguments": {"item": "honey"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "Packs in stock",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]


class Script:
    """Says what it is told to, and remembers what it was asked."""

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        self.renderer = renderer
        self.texts = list(texts)
        self.calls: list[tuple[list[int], list[int]]] = []

    async def __call__(self, ids: list[int]) -> Sampled:
        stop = min(self.renderer.stop_token_ids)
        output = [*self.renderer.encode(self.texts.pop(0)).tolist(), stop]
        self.calls.append((ids, output))
        version = len(self.calls)
        return Sampled(output, [-0.25] * len(output), [version] * len(output))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_call_continues_the_tokens_of_the_call_that_it_repeats(renderer: Renderer) -> None:
    script = Script(renderer, CALL, "<answer>13</answer>")
    rollout = RecordedRollout(renderer, script, 2000)
    messages = [user("honey: packs?")]
    first = await rollout.answer(messages, TOOLS)
    ((name, arguments),) = first.calls
    assert (name, arguments) == ("stock", '{"item": "honey"}')
    said = first.message()
    call_id = said["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": "13"}
    second = await rollout.answer([*messages, said, result], TOOLS)
    assert second.content == "<answer>13</answer>"
    (chain,) = rollout.chains.sampled()
    (prompt, output), (next_prompt, next_output) = script.calls
    assert next_prompt[: len(prompt) + len(output)] == prompt + output
    assert chain.ids == next_prompt + next_output
    told = len(next_prompt) - len(prompt) - len(output)
    assert told > 0
    assert chain.mask == [1] * len(output) + [0] * told + [1] * len(next_output)
    assert chain.versions == [1] * len(output) + [-1] * told + [2] * len(next_output)
    assert chain.logprobs == [-0.25 if on else 0.0 for on in chain.mask]


async def test_another_conversation_is_another_sequence(renderer: Renderer) -> None:
    script = Script(renderer, "one", "two")
    rollout = RecordedRollout(renderer, script, 2000)
    await rollout.answer([user("first?")], [])
    await rollout.answer([user("second?")], [])
    ids = [chain.ids for chain in rollout.chains.sampled()]
    assert ids == [prompt + output for prompt, output in script.calls]


async def test_a_call_that_cannot_be_parsed_comes_back_as_text(renderer: Renderer) -> None:
    text = "<tool_call>\n{broken\n</tool_call>"
    reply = await RecordedRollout(renderer, Script(renderer, text), 2000).answer(
        [user("honey?")], TOOLS
    )
    assert (reply.content, reply.calls) == (text, ())


async def test_a_conversation_beyond_the_bound_is_refused(renderer: Renderer) -> None:
    rollout = RecordedRollout(renderer, Script(renderer, "never"), 3)
    with pytest.raises(AgentRLError, match=r"the conversation has \d+ tokens, more than allowed"):
        await rollout.answer([user("a question")], [])

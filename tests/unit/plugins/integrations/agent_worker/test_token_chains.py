"""Conversations continued token by token when a framework repeats them."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError, InferenceError
from agentrl.inference.dialects.messages import read_message
from agentrl.plugins.integrations.agent_worker.token_chains import (
    RecordedRollout,
    SampledTokens,
    TokenChain,
    TokenChains,
)
from agentrl.renderers import Renderer

MODEL = Path(__file__).parents[5] / "assets/demo/model"
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


USER = {"role": "user", "content": "How many?"}


def call(arguments: str, identity: str) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def said(arguments: str = '{"item": "honey"}', identity: str = "a", content: Any = "") -> Any:
    calls = [call(arguments, identity)]
    return read_message({"role": "assistant", "content": content, "tool_calls": calls}, 0)


def answered(
    chains: TokenChains, messages: list[Any], reply: Any, num_sampled: int = 1
) -> TokenChain:
    chain = chains.take(messages)
    chain.ids += [1] * (num_sampled + 1)
    chain.mask += [1] * num_sampled
    chains.answered(chain, messages, reply)
    return chain


def test_a_repeated_conversation_is_continued_however_it_is_spelt() -> None:
    chains = TokenChains()
    first = answered(chains, [USER], said())
    result = {"role": "tool", "content": "7", "tool_call_id": "b"}
    again = said('{"item":"honey"}', "b", content=None)
    assert chains.take([USER, again, result]) is first


@pytest.mark.parametrize(
    "changed", [said('{"item": "silk"}'), said(content="Well."), {**USER, "content": "Else?"}]
)
def test_an_edited_conversation_begins_anew(changed: Any) -> None:
    chains = TokenChains()
    first = answered(chains, [USER], said())
    messages = [changed] if changed["role"] == "user" else [USER, changed]
    other = chains.take(messages)
    assert other is not first
    assert other.ids == []


def test_the_longest_known_beginning_is_continued() -> None:
    chains = TokenChains()
    short = answered(chains, [USER], said())
    long = answered(chains, [USER, said('{"item": "silk"}')], said())
    assert chains.take([USER, said('{"item": "silk"}'), said(), USER]) is long
    assert chains.take([USER, said(), USER]) is short


def test_parallel_calls_of_one_conversation_do_not_share_tokens() -> None:
    chains = TokenChains()
    answered(chains, [USER], said())
    one = chains.take([USER, said(), USER])
    assert chains.take([USER, said(), USER]) is not one


def test_the_chain_with_the_most_sampled_tokens_is_trained() -> None:
    chains = TokenChains()
    assert chains.longest() is None
    answered(chains, [USER], said(), num_sampled=2)
    most = answered(chains, [{**USER, "content": "Else?"}], said(), num_sampled=5)
    chains.take([{**USER, "content": "Never answered"}])
    assert chains.longest() is most


class Script:
    """Says what it is told to, and remembers what it was asked."""

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        self.renderer = renderer
        self.texts = list(texts)
        self.calls: list[tuple[list[int], list[int]]] = []

    async def __call__(self, ids: list[int]) -> SampledTokens:
        stop = min(self.renderer.stop_token_ids)
        output = [*self.renderer.encode(self.texts.pop(0)).tolist(), stop]
        self.calls.append((ids, output))
        version = len(self.calls)
        return SampledTokens(output, [-0.25] * len(output), [version] * len(output))


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


async def test_a_call_that_failed_is_retried_from_the_same_tokens(renderer: Renderer) -> None:
    script = Script(renderer, "one", "two", "three")
    failing = True

    async def generate(ids: list[int]) -> SampledTokens:
        sampled = await script(ids)
        if failing:
            raise InferenceError("the servers are away")
        return sampled

    rollout = RecordedRollout(renderer, generate, 2000)
    messages = [user("first?")]
    with pytest.raises(InferenceError):
        await rollout.answer(messages, [])
    failing = False
    reply = await rollout.answer(messages, [])
    messages += [reply.message(), user("and then?")]
    failing = True
    script.texts.append("four")
    with pytest.raises(InferenceError):
        await rollout.answer(messages, [])
    failing = False
    await rollout.answer(messages, [])
    prompts = [prompt for prompt, _ in script.calls]
    assert (prompts[0], prompts[2]) == (prompts[1], prompts[3])
    (chain,) = rollout.chains.sampled()
    assert chain.ids == prompts[3] + script.calls[3][1]

"""Conversations recognised when a framework repeats them, and the endpoint through which it does."""

from typing import Any

import openai
import pytest

from agentrl.inference.dialects.messages import read_message
from agentrl.integrations.agent_worker.answering import AnsweringSession, ConversationTooLong, Reply
from agentrl.integrations.agent_worker.chain import Chain, Chains
from agentrl.rollout.agent import OpenAIServer

USER = {"role": "user", "content": "How many?"}


def call(arguments: str, identity: str) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def said(arguments: str = '{"item": "honey"}', identity: str = "a", content: Any = "") -> Any:
    calls = [call(arguments, identity)]
    return read_message({"role": "assistant", "content": content, "tool_calls": calls}, 0)


def answered(chains: Chains, messages: list[Any], reply: Any, num_sampled: int = 1) -> Chain:
    chain = chains.take(messages)
    chain.messages = [*messages, reply]
    chain.ids += [1] * (num_sampled + 1)
    chain.mask += [1] * num_sampled
    chain.busy = False
    return chain


def test_a_repeated_conversation_is_continued_however_it_is_spelt() -> None:
    chains = Chains()
    first = answered(chains, [USER], said())
    result = {"role": "tool", "content": "7", "tool_call_id": "b"}
    again = said('{"item":"honey"}', "b", content=None)
    assert chains.take([USER, again, result]) is first


@pytest.mark.parametrize(
    "changed", [said('{"item": "silk"}'), said(content="Well."), {**USER, "content": "Else?"}]
)
def test_an_edited_conversation_begins_anew(changed: Any) -> None:
    chains = Chains()
    first = answered(chains, [USER], said())
    messages = [changed] if changed["role"] == "user" else [USER, changed]
    other = chains.take(messages)
    assert other is not first
    assert other.ids == []


def test_the_longest_known_beginning_is_continued() -> None:
    chains = Chains()
    short = answered(chains, [USER], said())
    long = answered(chains, [USER, said('{"item": "silk"}')], said())
    assert chains.take([USER, said('{"item": "silk"}'), said(), USER]) is long
    assert chains.take([USER, said(), USER]) is short


def test_parallel_calls_of_one_conversation_do_not_share_tokens() -> None:
    chains = Chains()
    answered(chains, [USER], said())
    one = chains.take([USER, said(), USER])
    assert chains.take([USER, said(), USER]) is not one


def test_the_chain_with_the_most_sampled_tokens_is_trained() -> None:
    chains = Chains()
    assert chains.longest() is None
    answered(chains, [USER], said(), num_sampled=2)
    most = answered(chains, [{**USER, "content": "Else?"}], said(), num_sampled=5)
    chains.take([{**USER, "content": "Never answered"}])
    assert chains.longest() is most


async def test_the_endpoint_answers_each_rollout_at_its_own_address() -> None:
    seen: list[Any] = []

    async def answer(messages: list[Any], tools: list[Any]) -> Reply:
        seen.append((messages, tools))
        if len(seen) == 1:
            return Reply("", (("price", '{"item": "honey"}'),), 5, 3)
        if len(seen) == 3:
            raise ConversationTooLong("no room is left")
        return Reply("done")

    tool = {"type": "function", "function": {"name": "price"}}
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    async with OpenAIServer.open("127.0.0.1") as server:
        session = AnsweringSession("m", answer)
        url = server.base_url(session)
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            create = client.chat.completions.create
            async with server.serve(session):
                first = await create(**ask, tools=[tool])
                frames = await create(**ask, stream=True)
                said = "".join([frame.choices[0].delta.content or "" async for frame in frames])
                with pytest.raises(openai.BadRequestError, match="no room is left"):
                    await create(**ask)
                with pytest.raises(openai.BadRequestError, match="ask for the form in words"):
                    await create(**ask, response_format={"type": "json_object"})
            with pytest.raises(openai.NotFoundError, match="this rollout is over"):
                await create(**ask)
    assert seen[0] == ([USER], [tool])
    assert first.choices[0].finish_reason == "tool_calls"
    (called,) = first.choices[0].message.tool_calls
    assert (called.function.name, called.function.arguments) == ("price", '{"item": "honey"}')
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 3)
    assert said == "done"

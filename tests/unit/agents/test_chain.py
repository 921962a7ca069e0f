"""Conversations recognised when a framework repeats them, and the endpoint through which it does."""

from typing import Any

import httpx
import pytest

from agentrl.agents.chain import Chain, Chains
from agentrl.agents.endpoint import Completions, Reply

USER = {"role": "user", "content": "How many?"}


def call(arguments: str, identity: str) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def said(arguments: str = '{"item": "honey"}', identity: str = "a", content: Any = "") -> Any:
    return {"role": "assistant", "content": content, "tool_calls": [call(arguments, identity)]}


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
    completions = await Completions.start()
    seen: list[Any] = []

    async def answer(messages: list[Any], tools: list[Any]) -> Reply:
        seen.append((messages, tools))
        return Reply("", (("price", '{"item": "honey"}'),)) if len(seen) == 1 else Reply("done")

    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "tools": [{}]}
    async with httpx.AsyncClient() as client, completions.session(answer) as url:
        first = (await client.post(f"{url}/chat/completions", json=body)).json()["choices"][0]
        second = (await client.post(f"{url}/chat/completions", json=body)).json()["choices"][0]
        refused = await client.post(f"{url}/chat/completions", json={**body, "stream": True})
    async with httpx.AsyncClient() as client:
        over = await client.post(f"{url}/chat/completions", json=body)
    await completions.stop()
    assert seen[0] == ([USER], [{}])
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"]["name"] == "price"
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", "done")
    assert (refused.status_code, over.status_code) == (400, 404)
    assert "streaming is not offered" in refused.json()["error"]["message"]

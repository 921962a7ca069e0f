"""Replies that are held to a grammar: what is drawn, and which logprobs it gets."""

import asyncio
import json
from itertools import islice

import jsonschema
import numpy as np
import pytest
from support.engines import EOS, Oracle, Served, prompt, request

from agentrl.errors import ServerRefused
from agentrl.inference.client.json_transport import JsonTransport
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.reply import reply_grammar
from agentrl.schema.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "kind": {"enum": ["lamp", "candle"]}},
    "required": ["open", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_tokens_that_the_grammar_allows(
    client: SGLangClient, served: Served, oracle: Oracle, temperature: float
) -> None:
    grammar = Grammar(kind="regex", text="[ab]{4}")
    asked = [request(n, grammar=grammar, temperature=temperature) for n in range(3)]
    for one, got in zip(asked, await asyncio.gather(*map(client.generate, asked)), strict=True):
        *letters, end = got.output_ids.tolist()
        renderer = Renderer.load(served.first)
        choices = renderer.encode("ab").tolist()
        assert (len(letters), end, got.finish_reason) == (4, EOS, "stop")
        assert set(letters) <= set(choices)
        # The last has no alternative; the model alone would give it less, as it does the others.
        assert got.output_logprobs[-1] == 0.0
        alone = oracle.logprobs(served.first, one.input_ids, got.output_ids, temperature)
        assert (alone < got.output_logprobs).all()
        for place, letter in enumerate(letters):
            so_far = np.concatenate([one.input_ids, got.output_ids[:place]])
            both = [
                oracle.logprobs(served.first, so_far, np.array([c]), temperature)[0]
                for c in choices
            ]
            expected = both[choices.index(letter)] - np.logaddexp(*both)
            np.testing.assert_allclose(got.output_logprobs[place], expected, atol=1e-4)


async def test_a_reply_held_to_a_schema_is_json_of_it(client: SGLangClient, served: Served) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    asked = [request(n, grammar=grammar, max_new_tokens=1500, seed=n) for n in range(4)]
    renderer = Renderer.load(served.first)
    for got in await asyncio.gather(*map(client.generate, asked)):
        assert (got.finish_reason, got.matched) == ("stop", EOS)
        jsonschema.validate(json.loads(renderer.parse(got.output_ids).text), SCHEMA)


async def test_held_and_free_replies_run_side_by_side(
    client: SGLangClient, served: Served, oracle: Oracle
) -> None:
    held = [request(n, grammar=Grammar(kind="regex", text="[0-9]{8}")) for n in range(3)]
    free = [request(n) for n in range(3)]
    mixed = [one for pair in zip(held, free, strict=True) for one in pair]
    results = await asyncio.gather(*map(client.generate, mixed))
    for asked, got in zip(free, islice(results, 1, None, 2), strict=True):
        expected = oracle.logprobs(served.first, asked.input_ids, got.output_ids)
        np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)
    texts = [Renderer.load(served.first).parse(got.output_ids).text for got in results[::2]]
    assert all(text.isdecimal() and len(text) == 8 for text in texts)


async def test_a_reply_may_think_or_call_where_its_grammar_says_so(
    client: SGLangClient, served: Served
) -> None:
    grammar = reply_grammar(SCHEMA, thinking="optional", call_mark="<tool_call>")
    asked = [request(n, grammar=grammar, max_new_tokens=1500, seed=n) for n in range(4)]
    renderer = Renderer.load(served.first)
    for got in await asyncio.gather(*map(client.generate, asked)):
        reply = renderer.parse(got.output_ids)
        if got.finish_reason == "length":
            assert reply.text.startswith(("<think>", "<tool_call>", "{"))
        elif "<tool_call>" not in reply.text:
            jsonschema.validate(json.loads(reply.content), SCHEMA)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text='{"type": "strng"}'),
        Grammar(kind="json_schema", text="nope"),
        Grammar(kind="regex", text="("),
        Grammar(kind="ebnf", text="root ::= ("),
        Grammar(kind="structural_tag", text="{}"),
    ],
    ids=str,
)
async def test_a_grammar_that_cannot_be_compiled_is_refused(
    client: SGLangClient, grammar: Grammar
) -> None:
    with pytest.raises(ServerRefused, match="Failed to compile") as refused:
        await client.generate(request(1, grammar=grammar))
    assert (refused.value.status, refused.value.is_transient) == (400, False)
    assert len((await client.generate(request(1))).output_ids)


async def test_only_one_grammar_holds_a_reply(client: SGLangClient) -> None:
    body = {"input_ids": prompt(1).tolist(), "sampling_params": {"regex": "a", "ebnf": "b"}}
    transport = JsonTransport(client.base_url)
    try:
        with pytest.raises(ServerRefused, match=r"(?i)only one of"):
            await transport.post("/generate", body, {})
    finally:
        await transport.close()

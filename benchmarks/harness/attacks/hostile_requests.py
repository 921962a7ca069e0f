"""Requests that ended, stopped or blew up a server, or that a web page sends."""

import json
from typing import Any

from agentrl.schema.grammar import Grammar

_JSON = {"Content-Type": "application/json"}
_DEEP_LIST = "[" * 90_000 + "]" * 90_000
SAMPLING = (
    '{"top_k": 18446744073709551615}',
    '{"top_k": 4294967296}',
    '{"top_k": 0}',
    '{"min_new_tokens": 1, "stop_token_ids": [1000000]}',
    '{"min_new_tokens": 1, "stop_token_ids": [-1000000]}',
    '{"min_new_tokens": 1, "stop_token_ids": [1180591620717411303424]}',
    '{"sampling_seed": 1606938044258990275541962092341162602522202993782792835301376}',
    '{"sampling_seed": 9223372036854775808}',
    '{"repetition_penalty": 5e-324}',
    '{"temperature": 1e300}',
    '{"temperature": 1e999}',
    '{"temperature": NaN}',
    '{"logit_bias": {"1": NaN}}',
    '{"logit_bias": {"1": Infinity}}',
    '{"logit_bias": {"1": 1e300}}',
    '{"logit_bias": {"1' + "0" * 5000 + '": 1}}',
    '{"stop": [""]}',
    '{"stop": ""}',
    '{"stop": ["' + "a" * 100_000 + '"]}',
    json.dumps({"stop": ["a"] * 1000}),
    '{"stop": ["\\ud800"]}',
    '{"max_new_tokens": 1' + "0" * 300 + "}",
    '{"n": 200000}',
    '{"stream_interval": 1e30}',
    '{"custom_params": ' + _DEEP_LIST + "}",
)
"""JSON of sampling parameters that no model can do, or no machine type holds."""
PROMPTS = (
    '{"text": []}',
    '{"input_ids": []}',
    '{"input_ids": [[]]}',
    '{"input_ids": [1180591620717411303424]}',
    '{"text": "\\udc80"}',
    '{"text": "\ud800"}',
    '{"input_ids": [1], "rid": "\\ud800"}',
    json.dumps({"input_ids": [1], "rid": "r" * 10_000}),
    json.dumps({"input_ids": [[1]] * 1000}),
    json.dumps({"text": ["a"] * 1000}),
    _DEEP_LIST,
    '{"text": ' + _DEEP_LIST + "}",
    '{"input_ids": [1' + "0" * 5000 + "]}",
)
"""JSON of requests that ask for nothing, or for what is no text."""
PAGES: tuple[tuple[dict[str, str], int], ...] = (
    ({"Content-Type": "text/plain"}, 415),
    ({}, 415),  # a page sends a Blob without a type
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    (_JSON | {"Origin": "http://evil.example"}, 403),
    (_JSON | {"Origin": "null"}, 403),
    (_JSON | {"Origin": "http://127.0.0.1:8080"}, 403),
    (_JSON | {"Sec-Fetch-Site": "cross-site"}, 403),
    (_JSON | {"Host": "evil.example"}, 421),
    (_JSON | {"Host": "127.0.0.1.evil.example:30000"}, 421),
    (_JSON | {"Host": "[::1].evil.example"}, 421),
)
"""Headers with which pages of other origins post, and the status that each is refused with."""


def reference_chain(length: int) -> str:
    """Return a JSON schema in which each definition refers to the next."""
    links = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(length)}
    links[f"a{length}"] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": links})


def nested_objects(depth: int) -> str:
    """Return a JSON schema of objects in objects."""
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def rule_chain(length: int) -> str:
    """Return a Lark grammar in which each rule names the next."""
    rules = [f"r{n}: r{n + 1}" for n in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


KILLERS = [
    Grammar(kind="json_schema", text=reference_chain(20_000)),
    Grammar(kind="json_schema", text=nested_objects(1_000)),
    Grammar(kind="ebnf", text=rule_chain(20_000)),
]
"""The compiler of grammars dies of them, or takes more than it may."""
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
"""An ordinary call of an agent."""


def held_to(schema: str) -> str:
    """Return a call whose reply is to follow a schema; as text, for some nest too deep to be built."""
    form = f'{{"type": "json_schema", "json_schema": {{"name": "reply", "schema": {schema}}}}}'
    return f'{json.dumps(CHAT)[:-1]}, "response_format": {form}}}'


CALLS = (
    *(
        json.dumps(CHAT | more)
        for more in (
            *({"seed": 2**200}, {"seed": -(2**70)}, {"max_tokens": 2**70}, {"temperature": 1e300}),
            *({"repetition_penalty": 5e-324}, {"top_k": 2**64 - 1}, {"min_tokens": 2**70}),
            *({"n": 200_000}, {"logit_bias": {"1": 1e300}}, {"stop": [""]}, {"stop": ["\ud800"]}),
            {"messages": [{"role": "user", "content": "\ud83d"}]},
        )
    ),
    held_to(nested_objects(800)),
    json.dumps({"model": "m", "prompt": [2**70]}),
    json.dumps({"model": "m", "prompt": [-1]}),
)
"""Calls of an agent that were answered with 503 and booked as failures of the infrastructure."""
CALLS_WITH_SCHEMAS = tuple(
    map(
        held_to,
        (
            *(reference_chain(20_000), reference_chain(900), nested_objects(1_000)),
            json.dumps({"description": "x" * 100_000}),
            json.dumps({"properties": {f"p{n}": {"type": "object"} for n in range(3_000)}}),
        ),
    )
)
"""Calls of an agent that kill the compiler of a server, or take seconds to check."""

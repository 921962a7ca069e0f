"""The dialect `/v1/chat/completions`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from pydantic import Field

from agentrl.errors import APIError
from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.messages import read_message
from agentrl.inference.dialects.openai_common import (
    CompletionBody,
    CompletionCall,
    error_body,
    parse_body,
    require,
)
from agentrl.inference.dialects.session import (
    ChatRequest,
    Completion,
    Delta,
    ModelSession,
    OnDelta,
)
from agentrl.inference.openapi import schema_of
from agentrl.inference.request_bodies import nests_deeper
from agentrl.inference.wire import MAX_GRAMMAR_CHARS, MAX_INT32

MAX_SCHEMA_CHARS = MAX_GRAMMAR_CHARS // 2
"""Half of the limit, because a grammar contains the schema and the text that may surround it."""
_MAX_SCHEMA_NESTING = 40
_MAX_REFS = 256
_MAX_OBJECTS = 1000
"""Each object takes a millisecond to check."""
_MAX_CACHED_SCHEMAS = 128
_MAX_MESSAGES = 20_000
_TOOL_KEYS = ("name", "description", "parameters")


class _ChatBody(CompletionBody):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request."""
    parsed = parse_body(_ChatBody, body)
    require(not parsed.top_logprobs, "top_logprobs", "alternatives are not returned; use 0")
    tools = tuple(_read_tool(tool, i) for i, tool in enumerate(parsed.tools or ()))
    must_call, called_tool = _forced_tool(
        parsed.tool_choice, [t["function"]["name"] for t in tools]
    )
    return ChatRequest(
        model=parsed.model,
        messages=tuple(read_message(raw, i) for i, raw in enumerate(parsed.messages)),
        tools=tools,
        may_call=bool(tools) and parsed.tool_choice != "none",
        must_call=must_call,
        called_tool=called_tool,
        json_schema=_json_schema(parsed.response_format),
        sampling=parsed.sampling(parsed.max_completion_tokens or parsed.max_tokens),
        raw=body,
        logprobs=bool(parsed.logprobs),
        stream=parsed.stream,
        include_usage=parsed.include_usage,
        token_ids=parsed.return_token_ids,
    )


class _ChatCall(CompletionCall):
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        self._chat = read_chat(body)
        super().__init__(self._chat, "chat.completion")
        self._session = session
        self._has_started = False

    async def run(self, on_delta: OnDelta | None) -> Completion:
        return await self._session.chat(self._chat, on_delta)

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield from self._start_events()
        yield self._choice_event({"delta": {delta.kind: delta.text}})

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield from self._start_events()
        yield from super().final_events(completion)

    def _whole_choice(self, completion: Completion) -> dict[str, Any]:
        return {"message": wire_message(completion), "logprobs": _logprobs(completion)}

    def _last_choices(self, completion: Completion) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(wire_calls(completion)):
            yield {"delta": {"tool_calls": [{"index": index, **call}]}}
        end = {"logprobs": _logprobs(completion), "finish_reason": completion.finish_reason}
        yield {"delta": {}, **end}

    def _start_events(self) -> Iterator[str]:
        if not self._has_started:
            self._has_started = True
            yield self._choice_event({"delta": {"role": "assistant", "content": ""}})


CHAT_SCHEMA = schema_of(_ChatBody)
DIALECT = Dialect("/v1/chat/completions", _ChatCall, error_body, CHAT_SCHEMA)


def wire_message(completion: Completion) -> dict[str, Any]:
    """Return the message of a completion in the form that clients read."""
    calls = wire_calls(completion)
    return {
        **completion.message,
        # OpenAI sends null if there are calls and no text.
        "content": completion.message["content"] or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }


def wire_calls(completion: Completion) -> list[dict[str, Any]]:
    """Return the tool calls of a completion, their arguments as JSON text."""
    return [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": _as_json(call["function"]["arguments"]),
            },
        }
        for call in completion.message.get("tool_calls", ())
    ]


def unusable_schema(reason: str) -> APIError:
    """Return the error for a schema that replies cannot be constrained to."""
    param = "response_format"
    return APIError(f"{param}: {reason}", code="invalid_json_schema", param=param)


def _as_json(arguments: Any) -> str:
    # Arguments that were not valid JSON are still text.
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _forced_tool(
    choice: str | Mapping[str, Any] | None, names: Sequence[str]
) -> tuple[bool, str | None]:
    """Return whether a tool must be called, and which one if only one is possible."""
    if choice in (None, "auto", "none"):
        return False, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)  # `/v1/responses` puts the name next to the type
        name = function.get("name") if isinstance(function, Mapping) else None
        require(name in names, "tool_choice", f"the request's tools have no {name!r}")
        return True, name
    require(choice in ("required", "any"), "tool_choice", "use none, auto, required or a function")
    require(bool(names), "tool_choice", "the request has no tools to call")
    return True, names[0] if len(names) == 1 else None


def _json_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema that a reply has to follow, if any."""
    kind = (response_format or {}).get("type", "text")
    if kind == "text" or response_format is None:
        return None
    if kind == "json_object":
        return {"type": "object"}
    require(
        kind == "json_schema",
        "response_format",
        f"unknown type {kind!r}; use text, json_object or json_schema",
    )
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    param = "response_format.json_schema.schema"
    require(isinstance(schema, dict), param, "must be a JSON schema (an object)")
    assert isinstance(schema, dict)
    problem = _schema_problem(json.dumps(schema))
    if problem is not None:
        raise unusable_schema(problem)
    return schema


@lru_cache(_MAX_CACHED_SCHEMAS)
def _schema_problem(text: str) -> str | None:
    """Return why replies cannot be constrained to a schema; cached, since agents repeat schemas."""
    # Servers compile grammars in native code that recurses over nesting and references.
    num_refs = text.count('"$ref"')
    schema = json.loads(text)
    if len(text) > MAX_SCHEMA_CHARS:
        return f"the schema has {len(text)} characters, at most {MAX_SCHEMA_CHARS} are compiled"
    if num_refs > _MAX_REFS:
        return f"the schema has {num_refs} references, at most {_MAX_REFS} are followed"
    if text.count("{") > _MAX_OBJECTS:
        return f"the schema has more than {_MAX_OBJECTS} objects"
    if nests_deeper(schema, _MAX_SCHEMA_NESTING):
        return f"the schema nests deeper than {_MAX_SCHEMA_NESTING} levels"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        path = "/".join(map(str, error.absolute_path))
        return f"{path or 'the schema'}: {error.message}"
    return None


def _read_tool(tool: Mapping[str, Any], position: int) -> dict[str, Any]:
    function = tool.get("function")
    require(
        tool.get("type", "function") == "function"
        and isinstance(function, dict)
        and isinstance(function.get("name"), str),
        f"tools[{position}]",
        "only functions with a name are supported",
    )
    assert isinstance(function, dict)
    # Other keys (`strict`) are meant for the provider, not for the model.
    definition = {key: function[key] for key in _TOOL_KEYS if function.get(key) is not None}
    return {"type": "function", "function": definition}


def _logprobs(completion: Completion) -> dict[str, Any] | None:
    if not completion.token_logprobs:
        return None
    return {
        "content": [
            {
                "token": token,
                "logprob": logprob,
                "bytes": list(token.encode()),
                "top_logprobs": [],
            }
            for token, logprob in completion.token_logprobs
        ],
        "refusal": None,
    }

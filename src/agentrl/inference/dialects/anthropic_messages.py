"""The dialect `/v1/messages`: spoken by Anthropic's clients and by agents written for Claude.

A request is converted to one of `/v1/chat/completions` and answered as such; thinking, text and
tool calls become blocks of the answer. `/v1/messages/count_tokens` counts the prompt of such a
request.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from agentrl.errors import APIError
from agentrl.inference.dialects.chat_completions import CHAT_SCHEMA, read_chat
from agentrl.inference.dialects.dialect import Dialect, bearer_key
from agentrl.inference.dialects.openai_common import refuse_unsupported
from agentrl.inference.dialects.session import (
    Completion,
    Delta,
    DeltaKind,
    FinishReason,
    ModelSession,
    OnDelta,
)
from agentrl.inference.openapi import Schema, fields_of

Items = list[dict[str, Any]]

_SHARED = ("model", "temperature", "top_p", "top_k", "stream")
_UNSUPPORTED = ("mcp_servers", "container", "fallbacks")
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
assert _STOP_REASONS.keys() == set(get_args(FinishReason))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCK_OF: dict[DeltaKind, str] = {"reasoning_content": "thinking", "content": "text"}
"""Part of a message -> the type of its block, and the field of the block that holds the text."""
_SIGNATURE = "unsigned"
"""Clients send thinking back with its signature. No real signature is needed, because the policy's
thinking is stored with its turn."""


def _error_body(error: APIError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _api_key(headers: Mapping[str, str]) -> str:
    """Return the key of `X-Api-Key`, or of `Authorization` if a token was configured."""
    return headers.get("x-api-key") or bearer_key(headers)


class _MessagesCall:
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        if body.get("max_tokens") is None:
            raise _malformed("max_tokens", "this field is required")
        self._request = read_chat(_as_chat(body))
        self._session = session
        self._num_blocks = 0
        self._open_block: str | None = None
        self._has_started = False

    @property
    def stream(self) -> bool:
        return self._request.stream

    async def run(self, on_delta: OnDelta | None) -> Completion:
        return await self._session.chat(self._request, on_delta)

    def body(self, completion: Completion) -> dict[str, Any]:
        content = [
            _block(kind, completion.message.get(field, ""))
            for field, kind in _BLOCK_OF.items()
            if completion.message.get(field)
        ]
        return {
            **self._head(),
            "content": content + _tool_uses(completion),
            **_stop_fields(completion),
            "usage": _usage(completion),
        }

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield from self._start_events()
        kind = _BLOCK_OF[delta.kind]
        if self._open_block != kind:
            yield from self._close_block()
            self._open_block = kind
            yield self._block_event("start", content_block=_block(kind, ""))
        yield self._block_event("delta", delta={"type": f"{kind}_delta", kind: delta.text})

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield from self._start_events()
        yield from self._close_block()
        for block in _tool_uses(completion):
            arguments = json.dumps(block["input"], ensure_ascii=False)
            yield self._block_event("start", content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": arguments}
            yield self._block_event("delta", delta=delta)
            yield self._end_block()
        end = {"delta": _stop_fields(completion), "usage": _usage(completion)}
        yield _event({"type": "message_delta", **end})
        yield _event({"type": "message_stop"})

    def error_events(self, error: APIError) -> Iterator[str]:
        yield _event(_error_body(error))

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request.id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
        }

    def _start_events(self) -> Iterator[str]:
        if self._has_started:
            return
        self._has_started = True
        # The number of prompt tokens is known only at the end and is sent there.
        unknown = {"input_tokens": 0, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head(), "content": [], **end, "usage": unknown}
        yield _event({"type": "message_start", "message": message})

    def _close_block(self) -> Iterator[str]:
        if self._open_block is None:
            return
        if self._open_block == "thinking":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._block_event("delta", delta=signature)
        yield self._end_block()
        self._open_block = None

    def _end_block(self) -> str:
        event = self._block_event("stop")
        self._num_blocks += 1
        return event

    def _block_event(self, kind: str, **fields: Any) -> str:
        return _event({"type": f"content_block_{kind}", "index": self._num_blocks, **fields})


class _CountCall:
    """A request that only counts the tokens of its prompt."""

    stream = False

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        self._request = read_chat(_as_chat(body))
        self._session = session

    async def run(self, on_delta: OnDelta | None) -> Completion:
        num_tokens = await self._session.count_tokens(self._request)
        request = self._request
        empty = {"role": "assistant", "content": ""}
        return Completion(request.id, request.created, request.model, empty, "stop", num_tokens, 0)

    def body(self, completion: Completion) -> dict[str, Any]:
        return {"input_tokens": completion.num_prompt_tokens}

    def delta_events(self, delta: Delta) -> Iterator[str]:
        return iter(())

    def final_events(self, completion: Completion) -> Iterator[str]:
        return iter(())

    def error_events(self, error: APIError) -> Iterator[str]:
        return iter(())


_FIELDS = {
    "system": "a text, or a list of blocks",
    "messages": "of the user and the assistant, in texts or blocks",
    "stop_sequences": "texts that end the reply",
    "tools": "names, descriptions and input schemas",
    "tool_choice": f"an object whose type is one of {', '.join(_CHOICES)}, tool",
    "output_config": "`format` holds a schema that the reply has to follow",
}
_SCHEMA: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {name: {"description": text} for name, text in _FIELDS.items()}
    | fields_of(CHAT_SCHEMA, (*_SHARED, "max_tokens")),
}
DIALECT = Dialect("/v1/messages", _MessagesCall, _error_body, _SCHEMA, _api_key)
TOKEN_COUNTS = Dialect("/v1/messages/count_tokens", _CountCall, _error_body, _SCHEMA, _api_key)


def _malformed(param: str, reason: str) -> APIError:
    return APIError(f"{param}: {reason}", param=param)


def _unsupported(param: str, reason: str) -> APIError:
    return APIError(f"{param}: {reason}", code="unsupported_value", param=param)


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that a request of this dialect corresponds to."""
    refuse_unsupported(body)
    for name in _UNSUPPORTED:
        if body.get(name):
            raise _unsupported(name, "not supported: it runs on Anthropic's servers")
    _check_edits(body.get("context_management"))
    chat: dict[str, Any] = {name: body[name] for name in _SHARED if body.get(name) is not None}
    chat["messages"] = _system(body.get("system")) + _messages(body.get("messages"))
    if body.get("max_tokens") is not None:
        chat["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        tools = _list_of_objects(body["tools"], "tools")
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(tools)]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    config = body.get("output_config")
    if isinstance(config, Mapping) and config.get("format"):
        chat["response_format"] = _response_format(config["format"])
    return chat


def _check_edits(management: object) -> None:
    """Reject context edits, except the one that keeps all thinking, which is kept anyway."""
    edits = management.get("edits") if isinstance(management, Mapping) else management
    for edit in _list_of_objects(edits or [], "context_management.edits"):
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") != "all":
            raise _unsupported(
                "context_management",
                f"{edit.get('type')!r} is not supported; have the agent edit its messages itself",
            )


def _system(system: object) -> Items:
    if not system:
        return []
    text = _text_of(system, "system")
    return [{"role": "system", "content": text}]


def _messages(raw_messages: object) -> Items:
    messages: Items = []
    for position, message in enumerate(_list_of_objects(raw_messages, "messages")):
        param = f"messages[{position}]"
        role = message.get("role")
        content = message.get("content")
        blocks = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else _list_of_objects(content, f"{param}.content")
        )
        if role == "assistant":
            messages.append(_assistant_message(blocks, param))
        elif role == "user":
            messages += _user_messages(blocks, param)
        elif role == "system":
            messages += _system(content)
        else:
            raise _malformed(param, f"unknown role {role!r}; use user or assistant")
    if messages and messages[-1]["role"] == "assistant":
        raise _unsupported(
            "messages",
            "the last message must have the role user; a reply cannot be prefilled",
        )
    return messages


def _assistant_message(blocks: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
    """Return an assistant's message. Thinking that Anthropic encrypted is dropped."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: Items = []
    thoughts = ""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += _string(block, "text", param)
        elif kind == "thinking":
            thoughts += _string(block, "thinking", param)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unsupported(param, f"content of type {kind!r} is not supported")
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[Mapping[str, Any]], param: str) -> Items:
    """Return the messages of a user's turn: tool results first, in their order."""
    results: Items = []
    parts: Items = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content")
            inner = [] if content is None else content
            result = (
                inner
                if isinstance(inner, str)
                else [_part(p, param) for p in _list_of_objects(inner, f"{param}.content")]
            )
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            )
        else:
            parts.append(_part(block, param))
    return [*results, {"role": "user", "content": parts}] if parts else results


def _part(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return a block as a part of an OpenAI message."""
    kind = block.get("type")
    source = block.get("source")
    if kind == "text":
        return {"type": "text", "text": _string(block, "text", param)}
    if kind == "image" and isinstance(source, Mapping):
        if source.get("type") == "base64":
            address = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": address}}
        if source.get("type") == "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
    if kind == "tool_reference":
        # The agent deferred loading this tool. Here, all tools are available from the start.
        return {"type": "text", "text": f"{block.get('tool_name')} can be called."}
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return {"type": "text", "text": _string(source, "data", param)}
    raise _unsupported(param, f"content of type {kind!r} is not supported; send text or images")


def _tool(tool: Mapping[str, Any], position: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise _unsupported(
            f"tools[{position}]",
            f"{tool.get('type')!r} tools run on Anthropic's servers; give the policy tools with "
            "an input_schema",
        )
    function = {"parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise _unsupported("tool_choice", "use auto, any, none or a tool")
    return _CHOICES[kind]


def _response_format(output_format: object) -> dict[str, Any]:
    if not isinstance(output_format, Mapping) or output_format.get("type") != "json_schema":
        raise _unsupported("output_config.format", "only json_schema is supported")
    return {
        "type": "json_schema",
        "json_schema": {"name": "reply", "schema": output_format.get("schema")},
    }


def _text_of(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    return "\n\n".join(_string(block, "text", param) for block in _list_of_objects(value, param))


def _string(block: Mapping[str, Any], key: str, param: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _malformed(param, f"{key} must be text")
    return value


def _list_of_objects(value: object, param: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise _malformed(param, "must be a list of objects")
    return value


def _block(kind: str, text: str) -> dict[str, Any]:
    signature = {"signature": _SIGNATURE if text else ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signature}


def _tool_uses(completion: Completion) -> Items:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input(call["function"]["arguments"]),
        }
        for call in completion.message.get("tool_calls", ())
    ]


def _input(arguments: object) -> Mapping[str, Any]:
    # A block's input must be an object, but arguments that were not valid JSON are still text.
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _stop_fields(completion: Completion) -> dict[str, Any]:
    if completion.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_text}
    return {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None}


def _usage(completion: Completion) -> dict[str, Any]:
    num_cached = completion.num_cached_tokens
    return {
        "input_tokens": completion.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": completion.num_output_tokens,
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

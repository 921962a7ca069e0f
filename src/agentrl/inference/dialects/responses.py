"""The dialect `/v1/responses`: OpenAI's newer form of the same conversation.

A request is converted to one of `/v1/chat/completions` and answered as such.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentrl.errors import APIError
from agentrl.inference.dialects.chat_completions import (
    CHAT_SCHEMA,
    read_chat,
    wire_calls,
    wire_message,
)
from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.messages import content_of
from agentrl.inference.dialects.openai_common import error_body, refuse_unsupported
from agentrl.inference.dialects.session import (
    ChatRequest,
    Completion,
    Delta,
    DeltaKind,
    ModelSession,
    OnDelta,
)
from agentrl.inference.openapi import Schema, fields_of

Items = list[dict[str, Any]]

_UNSUPPORTED = ("background", "conversation", "prompt")
_SHARED = ("model", "temperature", "top_p", "stream")


class _ResponseCall:
    """A call of this dialect."""

    def __init__(self, body: Mapping[str, Any], session: ModelSession) -> None:
        before = session.messages_until(body.get("previous_response_id"))
        self._body = body
        self._chat = _as_chat(body, before)
        self._namespaced = _namespaced_functions(body.get("tools") or ())
        self._request = read_chat(self._chat)
        self._session = session
        self._num_events = 0
        self._output: Items = []
        self._open_item: _TextItem | None = None

    @property
    def stream(self) -> bool:
        return self._request.stream

    async def run(self, on_delta: OnDelta | None) -> Completion:
        completion = await self._session.chat(self._request, on_delta)
        # A request that continues from this id has its own instructions.
        messages = [m for i, m in enumerate(self._chat["messages"]) if i or m["role"] != "system"]
        self._session.keep_messages(f"resp_{completion.id}", [*messages, wire_message(completion)])
        return completion

    def body(self, completion: Completion) -> dict[str, Any]:
        is_truncated = completion.finish_reason == "length"
        return {
            **_head(self._body, completion),
            "status": "incomplete" if is_truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "output": self._all_output(completion),
            "usage": {
                "input_tokens": completion.num_prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": completion.num_cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": completion.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": completion.num_prompt_tokens + completion.num_output_tokens,
            },
        }

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield from self._start_events()
        if self._open_item is not None and self._open_item.kind != delta.kind:
            yield from self._close_item()
        if self._open_item is None:
            self._open_item = _TextItem(delta.kind, self._request.id, len(self._output))
            yield from self._events(self._open_item.begin())
        yield from self._events(self._open_item.extend(delta.text))

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield from self._start_events()
        if self._open_item is None and not completion.message.get("tool_calls"):
            yield from self.delta_events(Delta("content", ""))
        yield from self._close_item()
        for item in self._calls(completion):
            yield from self._events(_call_events(item, len(self._output)))
            self._output.append(item)
        response = {**self.body(completion), "output": self._output}
        yield from self._events([{"type": f"response.{response['status']}", "response": response}])

    def error_events(self, error: APIError) -> Iterator[str]:
        body = error_body(error)["error"]
        # OpenAI's client reads the error from `error`, other clients from the top level.
        event = {name: body[name] for name in ("code", "message", "param")}
        yield from self._events([{"type": "error", **event, "error": body}])

    def _all_output(self, completion: Completion) -> Items:
        items: Items = []
        calls = self._calls(completion)
        reasoning = completion.message.get("reasoning_content")
        if reasoning:
            items.append(_reasoning_item(f"rs_{completion.id}", reasoning))
        text = completion.message["content"]
        if text or not calls:
            items.append(_message_item(f"msg_{completion.id}", text))
        return items + calls

    def _calls(self, completion: Completion) -> Items:
        return [
            {
                "id": f"fc_{completion.id}_{position}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                **self._namespaced.get(call["function"]["name"], {}),
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for position, call in enumerate(wire_calls(completion))
        ]

    def _start_events(self) -> Iterator[str]:
        if self._num_events:
            return
        response = {
            **_head(self._body, self._request),
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        kinds = ("response.created", "response.in_progress")
        yield from self._events([{"type": kind, "response": response} for kind in kinds])

    def _close_item(self) -> Iterator[str]:
        if self._open_item is not None:
            yield from self._events(self._open_item.finish())
            self._output.append(self._open_item.item())
            self._open_item = None

    def _events(self, events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        for event in events:
            data = json.dumps({**event, "sequence_number": self._num_events}, ensure_ascii=False)
            self._num_events += 1
            yield f"event: {event['type']}\ndata: {data}\n\n"


_FIELDS = {
    "instructions": "the system message",
    "input": "a text, or a list of items",
    "previous_response_id": "the response that this one continues",
    "tools": "functions; tools that run on OpenAI's servers are not supported",
    "text": "`format` holds a schema that the reply has to follow",
}
_SCHEMA: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {name: {"description": text} for name, text in _FIELDS.items()}
    | fields_of(CHAT_SCHEMA, (*_SHARED, "tool_choice", "top_logprobs"))
    | {"max_output_tokens": CHAT_SCHEMA["properties"]["max_completion_tokens"]},
}
DIALECT = Dialect("/v1/responses", _ResponseCall, error_body, _SCHEMA)


def _as_chat(body: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the chat request that a responses request corresponds to."""
    refuse_unsupported(body)
    for name in _UNSUPPORTED:
        if body.get(name):
            raise APIError(f"{name} is not supported", code="unsupported_value", param=name)
    chat: dict[str, Any] = {name: body[name] for name in _SHARED if body.get(name) is not None}
    messages: Items = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += [dict(message) for message in before]
    messages += _messages(body.get("input"))
    chat["messages"] = messages
    if body.get("tools"):
        if not isinstance(body["tools"], list):
            raise APIError("tools: must be a list", param="tools")
        chat["tools"] = [
            tool for i, entry in enumerate(body["tools"]) for tool in _tools(entry, f"tools[{i}]")
        ]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = body["tool_choice"]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if isinstance(body.get("text"), Mapping) and body["text"].get("format"):
        chat["response_format"] = _response_format(body["text"]["format"])
    if body.get("top_logprobs"):
        chat["top_logprobs"] = body["top_logprobs"]
    return chat


def _response_format(text_format: object) -> Mapping[str, Any]:
    """Return `text.format` as the `response_format` of a chat request."""
    if not isinstance(text_format, Mapping):
        raise APIError("text.format: must be an object", param="text.format")
    if text_format.get("type") != "json_schema":
        return text_format
    return {
        "type": "json_schema",
        "json_schema": {k: v for k, v in text_format.items() if k != "type"},
    }


def _messages(items: object) -> Items:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise APIError("input: must be text or a list of items", param="input")
    messages: Items = []
    for position, item in enumerate(items):
        param = f"input[{position}]"
        if not isinstance(item, dict):
            raise APIError(f"{param}: must be an object", param=param)
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(
                {"role": item.get("role"), "content": content_of(item.get("content"), param)}
            )
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            output = content_of(item.get("output"), param)
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind != "reasoning":  # the policy's thinking is stored with its turn
            raise APIError(
                f"{param}: items of type {kind!r} are not supported",
                code="unsupported_content",
                param=param,
            )
    return messages


def _add_call(messages: Items, item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message that it is part of."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    name = _full_name(item.get("namespace"), item.get("name"))
    function = {"name": name, "arguments": item.get("arguments", "{}")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _tools(tool: object, param: str, namespace: object = None) -> Iterator[dict[str, Any]]:
    """Yield a function, or those of a namespace under names that start with the namespace."""
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if isinstance(tool, Mapping) and kind == "namespace" and namespace is None:
        inner = tool.get("tools")
        for position, function_tool in enumerate(inner if isinstance(inner, list) else ()):
            yield from _tools(function_tool, f"{param}.tools[{position}]", tool.get("name"))
        return
    if not isinstance(tool, Mapping) or kind != "function":
        raise APIError(
            f"{param}: {kind!r} tools run on OpenAI's servers; give the policy functions, and "
            "turn these off in the agent's settings",
            code="unsupported_value",
            param=param,
        )
    function = {key: value for key, value in tool.items() if key != "type"}
    function["name"] = _full_name(namespace, tool.get("name"))
    yield {"type": "function", "function": function}


def _full_name(namespace: object, name: object) -> object:
    return f"{namespace}__{name}" if namespace else name


def _namespaced_functions(tools: Iterable[Mapping[str, Any]]) -> dict[object, dict[str, Any]]:
    """Return the functions of namespaces: full name -> `name` and `namespace` of a call."""
    return {
        _full_name(group["name"], tool["name"]): {"name": tool["name"], "namespace": group["name"]}
        for group in tools
        if group["type"] == "namespace"
        for tool in group["tools"]
    }


def _head(body: Mapping[str, Any], call: Completion | ChatRequest) -> dict[str, Any]:
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "error": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": call.model,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def _reasoning_item(id_: str, text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"id": id_, "type": "reasoning", "summary": [], "content": [part]}


def _message_item(id_: str, text: str) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _TextItem:
    """An item of text that is being streamed."""

    def __init__(self, kind: DeltaKind, call_id: str, index: int) -> None:
        self.kind = kind
        self._text = ""
        prefix = "rs" if kind == "reasoning_content" else "msg"
        self._id = f"{prefix}_{call_id}" if index < 2 else f"{prefix}_{call_id}_{index}"
        self._index = index
        self._location = {"item_id": self._id, "output_index": index, "content_index": 0}

    def item(self) -> dict[str, Any]:
        """Return the item with the text so far."""
        make = _reasoning_item if self.kind == "reasoning_content" else _message_item
        return make(self._id, self._text)

    def begin(self) -> Iterator[dict[str, Any]]:
        added = {**self.item(), "content": []}
        if self.kind == "content":
            added["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": self._index, "item": added}
        if self.kind == "content":
            part = _text_part("")
            yield {"type": "response.content_part.added", **self._location, "part": part}

    def extend(self, text: str) -> Iterator[dict[str, Any]]:
        self._text += text
        if self.kind == "content":
            delta = {"delta": text, "logprobs": []}
            yield {"type": "response.output_text.delta", **self._location, **delta}
        else:
            yield {"type": "response.reasoning_text.delta", **self._location, "delta": text}

    def finish(self) -> Iterator[dict[str, Any]]:
        if self.kind == "content":
            text = {"text": self._text, "logprobs": []}
            yield {"type": "response.output_text.done", **self._location, **text}
            part = _text_part(self._text)
            yield {"type": "response.content_part.done", **self._location, "part": part}
        else:
            yield {"type": "response.reasoning_text.done", **self._location, "text": self._text}
        item = self.item()
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}


def _call_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    location = {"item_id": item["id"], "output_index": index}
    kind = "response.function_call_arguments"
    added = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": added}
    yield {"type": f"{kind}.delta", **location, "delta": item["arguments"]}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": f"{kind}.done", **location, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}

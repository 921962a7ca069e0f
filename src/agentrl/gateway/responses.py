"""`/v1/responses`: OpenAI's newer form of the same conversation.

A request becomes one of `/v1/chat/completions` and is answered as such; here the two forms are
turned into each other.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.chat import chat_body, wire_calls
from agentrl.gateway.completion import Completion
from agentrl.gateway.faults import Refusal
from agentrl.gateway.messages import text_of

Items = list[dict[str, Any]]

_REFUSED = ("background", "conversation", "prompt")
_SHARED = ("model", "temperature", "top_p", "stream")


def as_chat(body: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the chat request that a responses request amounts to.

    Args:
        body: of the request.
        before: the messages up to and with the response that it names as its predecessor.

    Raises:
        Refusal: it is malformed, or asks for what cannot be had.
    """
    for name in _REFUSED:
        if body.get(name):
            raise Refusal(f"{name} is not supported", code="unsupported_value", param=name)
    kind = ((body.get("text") or {}).get("format") or {}).get("type", "text")
    chat: dict[str, Any] = {name: body[name] for name in _SHARED if body.get(name) is not None}
    messages: Items = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += [dict(message) for message in before]
    messages += _messages(body.get("input"))
    chat["messages"] = messages
    if body.get("tools"):
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(body["tools"])]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = body["tool_choice"]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if kind != "text":
        chat["response_format"] = {"type": kind}
    if body.get("top_logprobs"):
        chat["top_logprobs"] = body["top_logprobs"]
    return chat


def chat_messages(chat: Mapping[str, Any], completion: Completion) -> Items:
    """Return the messages that a later request may go on with, instructions left out."""
    before = [m for i, m in enumerate(chat["messages"]) if i or m["role"] != "system"]
    return [*before, chat_body(completion)["choices"][0]["message"]]


def response_body(body: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
    """Return a whole response."""
    is_cut = completion.finish_reason == "length"
    return {
        **_head(body, completion),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(completion),
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


def response_frames(body: Mapping[str, Any], completion: Completion) -> Iterator[str]:
    """Yield a response as server-sent events."""
    whole = response_body(body, completion)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    for number, event in enumerate(_events(begun, whole)):
        data = json.dumps({**event, "sequence_number": number}, ensure_ascii=False)
        yield f"event: {event['type']}\ndata: {data}\n\n"


def response_id(completion: Completion) -> str:
    """Return the id by which a later request names this response."""
    return f"resp_{completion.id}"


def _messages(given: object) -> Items:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Refusal("input: has to be text or a list of items", param="input")
    messages: Items = []
    for position, item in enumerate(given):
        param = f"input[{position}]"
        if not isinstance(item, dict):
            raise Refusal(f"{param}: has to be an object", param=param)
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(
                {"role": item.get("role"), "content": text_of(item.get("content"), param)}
            )
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), param)
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind != "reasoning":  # what the policy thought is known from its turn
            raise Refusal(
                f"{param}: items of type {kind!r} are not supported",
                code="unsupported_content",
                param=param,
            )
    return messages


def _add_call(messages: Items, item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message that it is part of."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(tool: Mapping[str, Any], position: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise Refusal(
            f"tools[{position}]: {tool.get('type')!r} runs at OpenAI's; give the policy functions",
            code="unsupported_value",
            param=f"tools[{position}]",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _head(body: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
    return {
        "id": response_id(completion),
        "object": "response",
        "created_at": completion.created,
        "error": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": completion.model,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def _output(completion: Completion) -> Items:
    items: Items = []
    thought = completion.message.get("reasoning_content")
    if thought:
        part = {"type": "reasoning_text", "text": thought}
        items.append(
            {"id": f"rs_{completion.id}", "type": "reasoning", "summary": [], "content": [part]}
        )
    calls = wire_calls(completion)
    text = completion.message["content"]
    if text or not calls:
        items.append(
            {
                "id": f"msg_{completion.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [_text_part(text)],
            }
        )
    items += [
        {
            "id": f"fc_{completion.id}_{position}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for position, call in enumerate(calls)
    ]
    return items


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(begun: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": _begun_item(item),
        }
        if item["type"] == "message":
            yield from _text_events(place, item["content"][0])
        elif item["type"] == "function_call":
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": f"{kind}.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _text_events(place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {**place, "content_index": 0}
    text = {"text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.added", **place, "part": _text_part("")}
    delta = {"delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.delta", **place, **delta}
    yield {"type": "response.output_text.done", **place, **text}
    yield {"type": "response.content_part.done", **place, "part": part}


def _begun_item(item: Mapping[str, Any]) -> dict[str, Any]:
    if item["type"] == "message":
        return {**item, "status": "in_progress", "content": []}
    if item["type"] == "function_call":
        return {**item, "status": "in_progress", "arguments": ""}
    return dict(item)

"""Chat messages as agent frameworks send them, and what they mean.

A framework that goes on with a conversation sends back what it was answered, but seldom letter by
letter: ids of tool calls are its own, arguments are JSON with other spaces, thinking is left out,
an empty content is null. Two messages with the same `meaning` are the same message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.inference.dialects.api_errors import Refusal
from agentrl.schema import Message
from agentrl.schema.image import image_part

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_SEEN_ROLES = ("user", "tool")
_ROLES = {"developer": "system"}


def read_message(raw: Mapping[str, Any], position: int) -> Message:
    """Return a message in the form that chat templates take.

    Raises:
        Refusal: it holds more than text, images and tool calls, or is malformed.
    """
    param = f"messages[{position}]"
    role = raw.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal(f"{param}: unknown role {role!r}", param=param)
    content = content_of(raw.get("content"), param)
    if not isinstance(content, str) and role not in _SEEN_ROLES:
        raise _unsupported(param, "images are shown in messages of users and tools only")
    message: Message = {"role": _ROLES.get(role, role), "content": content}
    if role == "assistant":
        calls = raw.get("tool_calls") or ()
        if calls:
            message["tool_calls"] = [_read_call(call, param) for call in calls]
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
    elif role == "tool":
        message["tool_call_id"] = str(raw.get("tool_call_id") or "")
        if isinstance(raw.get("name"), str):
            message["name"] = raw["name"]
    return message


def content_of(content: object, param: str) -> str | list[dict[str, Any]]:
    """Return a content as chat templates take it: text, or parts where there are images.

    Args:
        content: a string, null, or a list of parts in any of OpenAI's forms.
        param: what it is the content of.

    Raises:
        Refusal: a part is neither text nor an image with an address.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{param}: content has to be text or a list of parts", param=param)
    parts = [_part(part, param) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: object, param: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _unsupported(param, "a part of a content has to be an object")
    kind = part.get("type")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind in _IMAGE_PARTS:
        image = part.get("image_url")
        address = image.get("url") if isinstance(image, dict) else image
        if isinstance(address, str) and address:
            return image_part(address)
        raise _unsupported(param, "an image needs its image_url; files are not kept here")
    raise _unsupported(param, f"content of type {kind!r} is not supported, text and images are")


def _unsupported(param: str, why: str) -> Refusal:
    return Refusal(f"{param}: {why}", code="unsupported_content", param=param)


def _read_call(call: object, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f"{param}: a tool call needs a function with a name", param=param)
    assert isinstance(call, dict)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments_of(function.get("arguments")),
        },
    }


def arguments_of(value: object) -> Any:
    """Return arguments as the object that their JSON says; what is no JSON stays as it is."""
    if not isinstance(value, str):
        return value or {}
    try:
        return json.loads(value or "{}")
    except ValueError:
        return value


def text_of(message: Message) -> str:
    """Return the words of a message, its images left out."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def with_addresses(
    messages: Sequence[Message], addresses: Mapping[str, str]
) -> tuple[Message, ...]:
    """Return messages whose images have other addresses: old one -> new one."""

    def moved(part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return dict(part)
        return image_part(addresses[part["image_url"]["url"]])

    return tuple(
        message
        if isinstance(message["content"], str)
        else {**message, "content": [moved(part) for part in message["content"]]}
        for message in messages
    )


def meaning(message: Message) -> str:
    """Return a text that is equal for two messages just when they mean the same."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    content = message.get("content") or ""
    if isinstance(content, str):
        content = content.strip()
    parts = (message["role"], content, calls)
    return json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)


def tools_meaning(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that is equal for the same tools in the same order."""
    return json.dumps(list(tools), sort_keys=True, default=str)


def with_own_ids(message: Message, own_ids: Mapping[str, str], names: Mapping[str, str]) -> Message:
    """Return a tool message under the ids that the policy's calls have here, with its tool's name.

    Args:
        message: any message; those of other roles are returned as they are.
        own_ids: the framework's id of a call -> ours.
        names: our id of a call -> name of the tool.
    """
    if message["role"] != "tool":
        return message
    given = message["tool_call_id"]
    own = own_ids.get(given, given)
    name = message.get("name") or names.get(own)
    return {**message, "tool_call_id": own, **({} if name is None else {"name": name})}

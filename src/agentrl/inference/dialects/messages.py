"""Converts chat messages of clients to the form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.errors import APIError
from agentrl.inference.request_bodies import MAX_NESTING, nests_deeper
from agentrl.schema import Message
from agentrl.schema.image import image_part

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_IMAGE_ROLES = ("user", "tool")
_ROLES = {"developer": "system"}


def read_message(raw: Mapping[str, Any], position: int) -> Message:
    """Return a message in the form that chat templates expect."""
    param = f"messages[{position}]"
    role = raw.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise APIError(f"{param}: unknown role {role!r}", param=param)
    content = content_of(raw.get("content"), param)
    if not isinstance(content, str) and role not in _IMAGE_ROLES:
        raise _unsupported(param, "only user and tool messages may hold images")
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
    """Return a content in the form that chat templates expect: text, or parts if it holds images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(f"{param}: content must be text or a list of parts", param=param)
    parts = [_part(part, param) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: object, param: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _unsupported(param, "each part of the content must be an object")
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
        raise _unsupported(param, "an image needs an image_url; uploaded files are not supported")
    raise _unsupported(param, f"content of type {kind!r} is not supported; send text or images")


def _unsupported(param: str, reason: str) -> APIError:
    return APIError(f"{param}: {reason}", code="unsupported_content", param=param)


def _read_call(call: object, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f"{param}: a tool call needs a function with a name", param=param)
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
    """Return the arguments of a call, decoded if they are JSON of ordinary depth, else unchanged."""
    if not isinstance(value, str):
        return value or {}
    try:
        arguments = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return value if nests_deeper(arguments, MAX_NESTING) else arguments

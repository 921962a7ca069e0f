"""Tool results as text and images for the model, including linked content.

A listing or a result that is partly malformed loses only the part.
"""

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from mcp import Client, MCPError
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from agentrl.errors import ToolError
from agentrl.runtime.printable import counted
from agentrl.schema.image import image_from_bytes
from agentrl.tools.servers.admission import describe

logger = logging.getLogger(__name__)

MAX_LINKS: Final = 5
"""Links of one result that are followed; further links are shown as text."""
_NOT_JSON = object()


def accept_misfits(client: Client, address: str) -> None:
    """Let a client take what fits of malformed listings and results, and say what does not.

    The SDK refuses the whole answer for one malformed tool, one unknown part, or structured
    content against the tool's output schema.
    """
    session = client.session
    dispatcher = session._dispatcher
    send, validate = dispatcher.send_raw_request, session.validate_tool_result

    async def sent(method: str, params: Any, opts: Any = None) -> dict[str, Any]:
        answer = await send(method, params, opts)
        if method == "tools/list":
            return _listing_that_fits(answer, client.protocol_version, address)
        return (
            _result_that_fits(answer, client.protocol_version) if method == "tools/call" else answer
        )

    async def validated(name: str, result: CallToolResult) -> None:
        try:
            await validate(name, result)
        except RuntimeError as error:
            problem = getattr(error.__cause__, "message", None) or str(error)
            _warn_once(f"{address}: a result of {name} does not fit its output schema", problem)
            note = f"[structured content that does not fit the tool's output schema: {problem}]"
            result.content.append(TextContent(type="text", text=note))

    dispatcher.send_raw_request = sent  # type: ignore[method-assign]
    session.validate_tool_result = validated  # type: ignore[method-assign]


def _listing_that_fits(answer: dict[str, Any], version: str, address: str) -> dict[str, Any]:
    """Return a listing without malformed tools; one of which none fits stays, and is refused."""
    tools = answer.get("tools")
    if not isinstance(tools, list) or _problem("tools/list", version, answer) is None:
        return answer
    fitting = []
    for tool in tools:
        problem = _problem("tools/list", version, {**answer, "tools": [tool]})
        if problem is None:
            fitting.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, dict) else tool
            _warn_once(f"{address}: leaving out the malformed tool {name!r:.80}", problem)
    return {**answer, "tools": fitting} if fitting else answer


def _result_that_fits(answer: dict[str, Any], version: str) -> dict[str, Any]:
    """Return a result without its malformed parts, with a line that counts them."""
    if _problem("tools/call", version, answer) is None:
        return answer
    content, structured = answer.get("content"), answer.get("structuredContent")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    parts = [_text(part) if isinstance(part, str) else part for part in parts]
    fitting = [p for p in parts if _problem("tools/call", version, {"content": [p]}) is None]
    if len(fitting) < len(parts):
        fitting.append(
            _text(f"[{counted(len(parts) - len(fitting), 'malformed part')}, not shown]")
        )
    if structured is not None and not isinstance(structured, dict):
        fitting.append(_text(json.dumps(structured, ensure_ascii=False)))
        structured = None
    result = {"content": fitting, "isError": answer.get("isError") is True}
    return result if structured is None else {**result, "structuredContent": structured}


def _problem(method: str, version: str, answer: Mapping[str, Any]) -> str | None:
    """Return where an answer violates the protocol, in one line, or None."""
    try:
        validate_server_result(method, version, answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@cache
def _warn_once(what: str, problem: str) -> None:
    """Warn once for each problem, which every rollout may meet again."""
    logger.warning("%s: %s", what, describe(ToolError(problem)))


def result_text(result: CallToolResult, max_chars: int, *, show_images: bool = False) -> str:
    """Return the text of a result, with its structured content if the text lacks it."""
    blocks = [b for b in result.content if not (show_images and _image_url(b) is not None)]
    texts = [*map(_block_text, blocks)]
    if result.structured_content is not None and not _contain(texts, result.structured_content):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return cut_middle("\n".join(texts), max_chars)


def _contain(texts: Sequence[str], structured: dict[str, Any]) -> bool:
    """Return whether a result's texts contain its structured content, as most servers' do."""
    # The official SDK wraps values that are not objects, and renders a list as one block per item.
    value = structured["result"] if structured.keys() == {"result"} else structured
    if value in texts or (isinstance(value, list) and value and len(value) == len(texts)):
        return True
    return any(_json_value(text) in (structured, value) for text in texts)


def _json_value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


def cut_middle(text: str, max_chars: int) -> str:
    """Return the text, cut in the middle to `max_chars` with a note of how much was left out."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


async def with_linked_resources(client: Client, result: CallToolResult) -> CallToolResult:
    """Return a result whose first links are replaced with their contents.

    The model cannot follow links itself. Only the server of the result is queried.
    """
    links = [block for block in result.content if isinstance(block, ResourceLink)][:MAX_LINKS]
    if not links or client.server_capabilities.resources is None:
        return result
    found = {link.uri: await _link_contents(client, link) for link in links}
    blocks: list[ContentBlock] = []
    for block in result.content:
        contents = found.get(block.uri) if isinstance(block, ResourceLink) else None
        blocks += contents or [block]
    return result.model_copy(update={"content": blocks})


async def _link_contents(client: Client, link: ResourceLink) -> list[ContentBlock]:
    """Return the contents of a link; nothing if the server does not provide them."""
    try:
        response = await client.read_resource(link.uri)
    except (MCPError, ValidationError):
        return []
    return [EmbeddedResource(type="resource", resource=one) for one in response.contents]


def result_images(result: CallToolResult) -> tuple[str, ...]:
    """Return the images of known formats in a result as `data:` URLs."""
    return tuple(url for block in result.content if (url := _image_url(block)) is not None)


def _image_url(block: ContentBlock) -> str | None:
    if isinstance(block, ImageContent):
        data = block.data
    elif isinstance(block, EmbeddedResource) and isinstance(block.resource, BlobResourceContents):
        data = block.resource.blob
    else:
        return None
    try:
        return image_from_bytes(base64.b64decode(data)).data_url
    except ValueError:
        return None


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent | AudioContent):
        kind = "image" if isinstance(block, ImageContent) else "audio"
        return f"[{kind} {block.mime_type}, {_decoded_size(block.data)} bytes, not shown]"
    if isinstance(block, ResourceLink):
        return f"[resource {block.name}: {block.uri}]"
    assert isinstance(block, EmbeddedResource)
    resource = block.resource
    if isinstance(resource, TextResourceContents):
        return resource.text
    size = _decoded_size(resource.blob)
    return f"[resource {resource.uri}, {resource.mime_type}, {size} bytes, not shown]"


def _decoded_size(base64_text: str) -> int:
    return len(base64_text.rstrip("=")) * 3 // 4

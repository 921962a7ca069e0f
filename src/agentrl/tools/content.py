"""What a tool returned, as text that a model can read."""

import json
from collections.abc import Sequence

from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)


def result_text(result: CallToolResult, max_chars: int) -> str:
    """Return the text of a result; structured content stands in where there is no other."""
    text = _join(result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return cut_middle(text, max_chars)


def cut_middle(text: str, max_chars: int) -> str:
    """Return a text of at most about `max_chars` characters, saying how much was left out."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


def _join(blocks: Sequence[ContentBlock]) -> str:
    return "\n".join(_block_text(block) for block in blocks)


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

"""Tool results as text and images for the model."""

import base64
import json

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

from agentrl.schema.image import image_from_bytes


def result_text(result: CallToolResult, max_chars: int, *, show_images: bool = False) -> str:
    """Return the text of a result, or its structured content as JSON if it has no other.

    Args:
        result: what the tool returned.
        max_chars: longer texts are cut.
        show_images: leave out the images that `result_images` returns.
    """
    blocks = [b for b in result.content if not (show_images and _image_url(b) is not None)]
    text = "\n".join(map(_block_text, blocks))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return cut_middle(text, max_chars)


def cut_middle(text: str, max_chars: int) -> str:
    """Return the text, cut in the middle to `max_chars` with a note of how much was left out."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


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

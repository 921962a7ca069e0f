"""Images, and the addresses by which tasks, messages and turns name them.

The bytes of an image are stored once; everything else holds its address, `sha256:` and a hash of
its content.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence

from agentrl.schema.base import Message, Value

_STORED = "sha256:"
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)


class Image(Value):
    """The bytes of one image file."""

    mime_type: str
    data: bytes

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.mime_type};base64,{base64.b64encode(self.data).decode()}"


def image_from_bytes(data: bytes) -> Image:
    """Return the image in a file's bytes; their signature decides its type.

    Raises:
        ValueError: they are not an image of a known format.
    """
    for signature, mime_type in _SIGNATURES:
        if data.startswith(signature) and (mime_type != "image/webp" or data[8:12] == b"WEBP"):
            return Image(mime_type=mime_type, data=data)
    raise ValueError("neither PNG, JPEG, GIF, WebP nor BMP")


def image_from_data_url(url: str) -> Image:
    """Return the image in a `data:` URL.

    Raises:
        ValueError: it is malformed, or not an image of a known format.
    """
    head, found, text = url.partition(",")
    if not (found and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError("not a base64 data: URL")
    try:
        return image_from_bytes(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(f"not base64 ({error})") from None


def stored_address(key: str) -> str:
    """Return the address of a stored image."""
    return _STORED + key


def stored_key(address: str) -> str | None:
    """Return the key of a stored image; None for an address of another kind."""
    return address.removeprefix(_STORED) if address.startswith(_STORED) else None


def image_part(address: str) -> dict[str, object]:
    """Return the part of a message's content that shows an image, in OpenAI form."""
    return {"type": "image_url", "image_url": {"url": address}}


def content_with_images(text: str, addresses: Sequence[str]) -> str | list[dict[str, object]]:
    """Return the content of a message that shows images before its text."""
    if not addresses:
        return text
    return [*map(image_part, addresses), {"type": "text", "text": text}]


def image_addresses(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the addresses of all images in messages, in order."""
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image_url":
                image = part["image_url"]
                found.append(image["url"] if isinstance(image, dict) else image)
    return tuple(found)

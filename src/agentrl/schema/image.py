"""Images, and the addresses by which tasks, messages and turns name them.

The bytes of an image are stored once; everything else holds its address, `sha256:` and a hash of
its content.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence

from agentrl.schema.base import Message, Value

MAX_PIXELS = 64 * 2**20
"""Maximum number of pixels of a decoded image: a small file may expand to gigabytes."""
IMAGE_MARK = "<image>"
"""Where a row's text shows the next of its images, in the data sets of verl, LLaMA-Factory and ms-swift."""
_STORED = "sha256:"
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)


_NON_FRAME_MARKERS = (0xC4, 0xC8, 0xCC)
"""JPEG markers in the range of frame headers, which contain the size, that are not frame headers."""


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
        ValueError: they are not an image of a known format, or it has more than `MAX_PIXELS` pixels.
    """
    for signature, mime_type in _SIGNATURES:
        if data.startswith(signature) and (mime_type != "image/webp" or data[8:12] == b"WEBP"):
            width, height = _size(data, mime_type)
            if width * height > MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS}")
            return Image(mime_type=mime_type, data=data)
    raise ValueError("not PNG, JPEG, GIF, WebP or BMP")


def _size(data: bytes, mime_type: str) -> tuple[int, int]:
    """Return width and height from the file's header; 0 if it does not contain them."""
    if mime_type == "image/png":
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    if mime_type == "image/gif":
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if mime_type == "image/bmp":
        sides = (data[18:22], data[22:26])
        width, height = (int.from_bytes(side, "little", signed=True) for side in sides)
        return abs(width), abs(height)  # rows of a negative height go downwards
    if mime_type == "image/jpeg":
        return _jpeg_size(data)
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    return 0, 0  # the sides of other forms of WebP have at most 14 bits


def _jpeg_size(data: bytes) -> tuple[int, int]:
    offset = 2
    while offset + 9 <= len(data) and data[offset] == 0xFF:
        marker, length = data[offset + 1], int.from_bytes(data[offset + 2 : offset + 4])
        if 0xC0 <= marker <= 0xCF and marker not in _NON_FRAME_MARKERS:
            sides = data[offset + 5 : offset + 7], data[offset + 7 : offset + 9]
            height, width = map(int.from_bytes, sides)
            return width, height
        offset += 2 + length
    return 0, 0


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


def parts_at_marks(text: str) -> list[dict[str, object]]:
    """Return a text as parts of a message: what stands between its marks, and `image` at each of them."""
    first, *others = text.split(IMAGE_MARK)
    parts: list[dict[str, object]] = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return [part for part in parts if part.get("text") != ""]


def question_content(text: str, addresses: Sequence[str]) -> str | list[dict[str, object]]:
    """Return the content of a question: its images at its marks, or before its text if it has none."""
    if not addresses or text.count(IMAGE_MARK) != len(addresses):
        return content_with_images(text, addresses)
    left = iter(addresses)
    return [
        image_part(next(left)) if part["type"] == "image" else part for part in parts_at_marks(text)
    ]


def shown_text(content: object) -> str:
    """Return the text of a message's content; parts that are not text are named by their kind."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(
        str(part.get("text", f"[{part.get('type')}]"))
        for part in parts
        if isinstance(part, Mapping)
    )


def image_addresses(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the addresses of all images in messages, in order."""
    addresses: list[str] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image_url":
                image = part["image_url"]
                addresses.append(image["url"] if isinstance(image, dict) else image)
    return tuple(addresses)

"""The images of a question file's entries.

They stand under `images` or `image` (one or a list), or as `image_url` parts in the first user
message: http(s) or `data:` URLs, files beside the question file, or the `{"bytes": ..}` of Hugging
Face data sets. Files are read here, so that no sampler ever opens a file that a question names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.datasets.entries import BadEntry
from agentrl.schema.image import image_addresses, image_from_bytes, image_from_data_url

_MOST_CHARS = 14 * 2**20
"""Images that travel inside a task, all together: a document holds 16 MB."""


def first_user_content(entry: Mapping[str, Any]) -> Any:
    """Return the content of the first user message in `messages` or `raw.messages`, or None."""
    raw = entry.get("raw")
    nested = raw.get("messages") if isinstance(raw, dict) else None
    for messages in (entry.get("messages"), nested):
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("role") == "user":
                return message.get("content")
    return None


def entry_images(entry: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Return the addresses of an entry's images: http(s) and `data:` URLs.

    Args:
        entry: the decoded entry.
        folder: where the names of files start from.

    Raises:
        BadEntry: one is missing, no image, or they are too large together.
    """
    given = entry.get("images") or entry.get("image") or ()
    if isinstance(given, str | dict):
        given = (given,)
    content = first_user_content(entry)
    if not given and isinstance(content, list):
        given = image_addresses([{"content": content}])
    found = tuple(_address(image, folder) for image in given)
    if sum(map(len, found)) > _MOST_CHARS:
        raise BadEntry("its images have more than 10 MB together; give their addresses instead")
    return found


def _address(image: object, folder: Path) -> str:
    try:
        if isinstance(image, dict) and isinstance(image.get("bytes"), bytes):
            return image_from_bytes(image["bytes"]).data_url
        if not isinstance(image, str):
            raise BadEntry(f"an image must be an address or a file, found {type(image).__name__}")
        if image.startswith(("http://", "https://")):
            return image
        if image.startswith("data:"):
            image_from_data_url(image)
            return image
        return image_from_bytes((folder / image).read_bytes()).data_url
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadEntry(f"image {str(image)[:80]!r}: {reason}") from None

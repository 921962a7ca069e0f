"""Which bytes are images, and how large they may be."""

from io import BytesIO

import pytest
from harness.tiny_vision import picture
from PIL import Image as PillowImage

from agentrl.schema.image import image_from_bytes

KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")


def huge(kind: str) -> bytes:
    """A small file whose header says 12000 x 12000 pixels of one color."""
    written = BytesIO()
    sides = (16, 16) if kind == "BMP" else (12_000, 12_000)
    PillowImage.new("1", sides).save(written, format=kind)
    data = bytearray(written.getvalue())
    if kind == "BMP":
        data[18:26] = (12_000).to_bytes(4, "little") * 2
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_decide_the_type(kind: str) -> None:
    assert image_from_bytes(picture(0, kind=kind)).mime_type == f"image/{kind.lower()}"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(kind: str) -> None:
    data = huge(kind)
    with pytest.raises(ValueError, match="12000 x 12000 pixels, more than 67108864"):
        image_from_bytes(data)

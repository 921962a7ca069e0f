"""`ImageReader`: reads image files for a model: how many positions each takes, and its pixels.

The family's own image processor in transformers computes both, with the settings stored with a
rollout: the trainer sees what the server saw. It always uses Pillow, because other back ends resize
with other filters. Files are untrusted; images that are too large are refused before decoding.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image as PillowImage
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, PretrainedConfig

from agentrl.data.shown_images import ShownImage, processor_key
from agentrl.errors import ImageError
from agentrl.schema.image import MAX_PIXELS

_ROWS_AND_COLUMNS = "mrope_section"
"""Key of rotary parameters that count time, rows and columns."""


class ImageReader:
    """Reads images for one model.

    Args:
        config: the model's configuration.
        path: directory with its tokenizer; None omits the tokens that a processor writes around
            images.
    """

    def __init__(self, config: PretrainedConfig, path: Path | None = None) -> None:
        self._config: Any = config
        self._path = path
        self._processors: dict[str, Any] = {}

    @property
    def token_id(self) -> int:
        """The token that represents each feature of an image."""
        token_id: int = self._config.image_token_id
        return token_id

    def shown(self, data: bytes, processor: Mapping[str, Any]) -> ShownImage:
        """Return an image file as it appears among tokens."""
        key = processor_key(processor)
        processed = self._process(data, processor)
        before, after = self._surrounding_tokens
        return ShownImage(
            key=f"{key}/{hashlib.sha256(data).hexdigest()}",
            data=data,
            processor=processor,
            image_token_id=self.token_id,
            num_positions=self._num_positions(processed),
            grid=self._grid(processed),
            is_whole=sees_images_whole(self._config),
            before=before,
            after=after,
        )

    def inputs(self, images: Sequence[ShownImage]) -> dict[str, torch.Tensor]:
        """Return the arguments of a model's `get_image_features` for images, in their order."""
        each = [self._process(image.data, image.processor) for image in images]
        names = [name for name in _INPUTS if name in each[0]]
        return {
            name: torch.from_numpy(np.concatenate([np.asarray(image[name]) for image in each]))
            for name in names
        }

    def _process(self, data: bytes, processor: Mapping[str, Any]) -> Mapping[str, Any]:
        picture = decoded(data)
        try:
            processed: Mapping[str, Any] = self._processor(processor)(
                images=[picture], return_tensors="np"
            )
        except ValueError as error:  # the family's own limits on the aspect ratio
            raise ImageError(f"{picture.width} x {picture.height} pixels: {error}") from error
        return processed

    def _processor(self, settings: Mapping[str, Any]) -> Any:
        key = processor_key(settings)
        if key not in self._processors:
            with TemporaryDirectory() as folder:
                (Path(folder) / "preprocessor_config.json").write_text(json.dumps(dict(settings)))
                self._processors[key] = AutoImageProcessor.from_pretrained(folder, backend="pil")
        return self._processors[key]

    def _num_positions(self, processed: Mapping[str, Any]) -> int:
        if "image_grid_thw" in processed:
            merged = self._config.vision_config.spatial_merge_size**2
            return int(np.prod(processed["image_grid_thw"][0])) // int(merged)
        if "num_soft_tokens_per_image" in processed:
            return int(processed["num_soft_tokens_per_image"][0])
        return int(self._config.mm_tokens_per_image)

    def _grid(self, processed: Mapping[str, Any]) -> tuple[int, int] | None:
        rope = getattr(self._config.get_text_config(), "rope_parameters", None) or {}
        if _ROWS_AND_COLUMNS not in rope:
            return None
        merge = self._config.vision_config.spatial_merge_size
        _, rows, columns = (int(size) for size in processed["image_grid_thw"][0])
        return rows // merge, columns // merge

    @cached_property
    def _surrounding_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the model's processor writes before and after an image."""
        kind = self._config.model_type
        if kind not in ("gemma3", "gemma4"):
            return (), ()
        blank: tuple[int, ...] = ()
        first, last = (
            (self._config.boi_token_index, self._config.eoi_token_index)
            if kind == "gemma3"
            else (self._config.boi_token_id, self._config.eoi_token_id)
        )
        if kind == "gemma3" and self._path is not None:
            tokenizer = Tokenizer.from_file(str(self._path / "tokenizer.json"))
            blank = tuple(tokenizer.encode("\n\n", add_special_tokens=False).ids)
        return (*blank, first), (last, *blank)


_INPUTS = ("pixel_values", "image_grid_thw", "image_position_ids")
"""Outputs of image processors that models read."""


def sees_images_whole(config: PretrainedConfig) -> bool:
    """Return whether the tokens of an image attend to one another in both directions."""
    text: Any = config.get_text_config()
    is_bidirectional = getattr(text, "use_bidirectional_attention", None) == "vision"
    return config.model_type == "gemma3" or is_bidirectional


def decoded(data: bytes) -> PillowImage.Image:
    """Return the picture in a file, in RGB; the first frame of an animation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about what is refused here
        try:
            with PillowImage.open(BytesIO(data), formats=_FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise ImageError(
                        f"{opened.width} x {opened.height} pixels, more than {MAX_PIXELS}"
                    )
                return opened.convert("RGB")
        except ImageError:
            raise
        except Exception as error:  # decoders of five formats, on untrusted bytes
            raise ImageError(f"cannot be decoded ({error})") from error


_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")

"""Converts `data:` URLs in requests to prompts that contain the images at their full length.

Decoding takes time and memory: the front end does it in its parsing thread, one request at a time.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from agentrl.data.shown_images import PlacedImage, ShownImage, expanded
from agentrl.errors import ImageError
from agentrl.models.vision.image_encoders import reads_images
from agentrl.models.vision.image_reader import ImageReader
from agentrl.plugins.engine.http.http_errors import InvalidRequest
from agentrl.renderers.model_files import image_placeholder, image_processor
from agentrl.schema.image import image_from_data_url

_CACHE_BYTES = 64 * 2**20


class PromptImages:
    """Inserts images at their placeholders in a prompt."""

    def __init__(
        self, model_path: str | Path, config: PretrainedConfig, max_positions: int
    ) -> None:
        self._max_positions = max_positions
        path = Path(model_path)
        self._processor = image_processor(path) if reads_images(config) else {}
        self._placeholder = image_placeholder(path)
        self._reader = ImageReader(config, path) if self._processor else None
        self._cache: OrderedDict[bytes, ShownImage] = OrderedDict()

    @property
    def are_read(self) -> bool:
        """Whether the model reads images and its directory describes how."""
        return self._reader is not None

    def show(
        self, prompt: Sequence[int], urls: Sequence[str]
    ) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
        """Return a prompt as the model reads it, int32, and the positions of its images.

        The ids have one placeholder per `data:` URL.
        """
        ids = np.asarray(prompt, dtype=np.int32)
        if not urls:
            return ids, ()
        if self._reader is None:
            raise InvalidRequest(
                "image_data: this model reads text only, or its directory lacks the settings of its "
                "image processor (preprocessor_config.json)"
            )
        places = np.flatnonzero(ids == self._placeholder).tolist()
        if len(places) != len(urls):
            raise InvalidRequest(
                f"image_data has {len(urls)} images for {len(places)} placeholders "
                f"(id {self._placeholder}) in input_ids"
            )
        images: list[ShownImage] = []
        length = len(ids)
        for number, url in enumerate(urls):
            images.append(self._read_image(self._reader, number, url))
            length += images[-1].num_tokens - 1
            if length > self._max_positions:  # before the next one is decoded
                raise InvalidRequest(
                    f"image_data[{number}]: with it, the prompt exceeds the context length of "
                    f"{self._max_positions} positions"
                )
        return expanded(ids, list(zip(places, images, strict=True)))

    def _read_image(self, reader: ImageReader, number: int, url: str) -> ShownImage:
        key = hashlib.sha256(url.encode(errors="replace")).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        try:
            shown = reader.shown(image_from_data_url(url).data, self._processor)
        except (ValueError, ImageError) as error:
            raise InvalidRequest(f"image_data[{number}]: {error}") from None
        self._cache[key] = shown
        while sum(len(cached.data) for cached in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return shown

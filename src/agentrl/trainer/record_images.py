"""`RecordImages`: reads the images of records from the store in the model's input format.

Rank 0 reads an image once, however many records and steps show it; the processor settings stored
with the turns determine its form.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from agentrl.config.sections import ModelSection
from agentrl.data.shown_images import ImageBook, ShownImage, processor_key
from agentrl.errors import ImageError, TrainingError
from agentrl.models.load import read_config
from agentrl.models.vision.image_encoders import reads_images
from agentrl.models.vision.image_reader import ImageReader
from agentrl.schema import DispatchedSamplingTask
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_CACHE_BYTES = 256 * 2**20


def image_reader(path: Path, model: ModelSection) -> ImageReader | None:
    """Return the image reader of the model in a directory; None if it reads text only."""
    config = read_config(path, trust_remote_code=model.trust_remote_code)
    return ImageReader(config, path) if reads_images(config) else None


class RecordImages:
    """Reads the images of records for one model.

    Args:
        store: holds the images.
        reader: of the model; None if it reads text only.
    """

    def __init__(self, store: TrajectoryStore, reader: ImageReader | None) -> None:
        self._store = store
        self._reader = reader
        self._cache: OrderedDict[tuple[str, str], ShownImage] = OrderedDict()

    async def book(self, turns: Iterable[DispatchedSamplingTask]) -> ImageBook:
        """Return the images that turns add; those that cannot be read are missing, and logged.

        Raises:
            TrainingError: the model reads text only.
        """
        turn_of_image = {
            (address, processor_key(turn.image_processor)): turn
            for turn in turns
            for address in turn.added_images
        }
        if self._reader is None:
            if not turn_of_image:
                return ImageBook()
            record = next(iter(turn_of_image.values())).record_id
            raise TrainingError(
                f"record {record} shows images, but the model reads text only; train on questions "
                "and tools without images (--max_images 0), or train a vision model"
            )
        found = {key: self._cache[key] for key in turn_of_image if key in self._cache}
        missing = [key for key in turn_of_image if key not in found]
        files = await self._store.images.get([address for address, _ in missing])
        for key, file in zip(missing, files, strict=True):
            turn = turn_of_image[key]
            try:
                shown = await asyncio.to_thread(self._reader.shown, file.data, turn.image_processor)
            except ImageError as error:
                logger.warning(
                    "%s is left out of training: image %s: %s", turn.record_id, key[0], error
                )
                continue
            found[key] = self._add_to_cache(key, shown)
        return ImageBook(found, self._reader.token_id)

    def _add_to_cache(self, key: tuple[str, str], shown: ShownImage) -> ShownImage:
        self._cache[key] = shown
        while sum(len(one.data) for one in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return shown

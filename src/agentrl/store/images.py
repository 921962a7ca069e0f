"""Images: every one stored once, by the hash of its content."""

from collections.abc import Sequence

from agentrl.errors import StoreError
from agentrl.schema.image import Image, stored_address, stored_key
from agentrl.store.blobs import Blob
from agentrl.store.door import Door, operation


class ImageDoor(Door):
    """Puts images into the blobs, and gets them out again."""

    @operation("store images")
    async def put_images(self, images: Sequence[Image]) -> list[str]:
        """Make the images durable; return their addresses."""
        blobs = [Blob("image", image.model_dump()) for image in images]
        await self._blobs.put(blobs)
        return [stored_address(blob.key) for blob in blobs]

    @operation("read images")
    async def images(self, addresses: Sequence[str]) -> list[Image]:
        """Return stored images, in the order of their addresses.

        Raises:
            StoreError: an address names no stored image.
        """
        keys = [stored_key(address) for address in addresses]
        found = await self._blobs.get(key for key in keys if key is not None)
        images = []
        for address, key in zip(addresses, keys, strict=True):
            if key is None:
                raise StoreError(f"{address[:80]!r} is not the address of a stored image")
            images.append(Image.model_validate(found[key]))
        return images

"""Images on their way from where they are found into the store, and from there to the engine."""

from collections import OrderedDict
from collections.abc import Sequence

from agentrl.errors import RenderError
from agentrl.rollout.image_fetch import Network, fetch_image
from agentrl.schema.image import Image, image_from_bytes, image_from_data_url, stored_key
from agentrl.store import TrajectoryStore

_REMEMBERED_BYTES = 64 * 2**20
_REMEMBERED_ADDRESSES = 4096


class ImageLibrary:
    """The images of all rollouts of a process; each is fetched and stored once.

    Args:
        store: keeps them.
        max_bytes: the largest image that is taken.
        networks: networks that images are fetched from beside the public ones.
    """

    def __init__(
        self, store: TrajectoryStore, max_bytes: int, networks: Sequence[Network] = ()
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._networks = networks
        self._fetched: OrderedDict[str, str] = OrderedDict()
        self._inlined: OrderedDict[str, str] = OrderedDict()
        self._inlined_bytes = 0

    async def keep(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Store images and return their addresses there.

        Args:
            addresses: `data:` URLs, http(s) URLs, or addresses of stored images.

        Raises:
            RenderError: one cannot be had, is too large, or is no image.
        """
        return tuple([await self._keep(address) for address in addresses])

    async def inlined(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return stored images as `data:` URLs, in the order of their addresses."""
        urls = {address: self._inlined.get(address) for address in addresses}
        missing = [address for address, url in urls.items() if url is None]
        found = await self._store.images.get(missing) if missing else ()
        for address, image in zip(missing, found, strict=True):
            urls[address] = image.data_url
            self._remember(address, image.data_url)
        return tuple(url for address in addresses if (url := urls[address]) is not None)

    async def _keep(self, address: str) -> str:
        if stored_key(address) is not None:
            return address
        if address in self._fetched:
            return self._fetched[address]
        try:
            image = await self._read(address)
        except ValueError as error:
            raise RenderError(f"image {_short(address)}: {error}") from None
        (stored,) = await self._store.images.put([image])
        if not address.startswith("data:"):
            self._fetched[address] = stored
            if len(self._fetched) > _REMEMBERED_ADDRESSES:
                self._fetched.popitem(last=False)
        return stored

    async def _read(self, address: str) -> Image:
        if address.startswith("data:"):
            image = image_from_data_url(address)
        elif address.startswith(("http://", "https://")):
            image = image_from_bytes(
                await fetch_image(address, max_bytes=self._max_bytes, networks=self._networks)
            )
        else:
            raise ValueError("neither a data: URL nor an http(s) address")
        if len(image.data) > self._max_bytes:
            raise ValueError(f"larger than max_image_megabytes={self._max_bytes / 2**20:g}")
        return image

    def _remember(self, address: str, url: str) -> None:
        self._inlined[address] = url
        self._inlined_bytes += len(url)
        while self._inlined_bytes > _REMEMBERED_BYTES and len(self._inlined) > 1:
            self._inlined_bytes -= len(self._inlined.popitem(last=False)[1])


def _short(address: str) -> str:
    return address if len(address) <= 80 else f"{address[:77]}..."

"""Images of rollouts: fetched from the addresses in messages, stored once, and sent to the engine.

Questions and agents' messages name addresses on the web. These are untrusted, and a sampler often
runs where it can reach a metadata service, a database or a neighbor's notebook. It therefore
connects only to public addresses and to the networks that the user allows. The check is made on the
connection rather than the name, which covers redirects and names that resolve to a private address.
"""

import errno
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import aiohttp

from agentrl.errors import RenderError
from agentrl.schema.image import Image, image_from_bytes, image_from_data_url, stored_key
from agentrl.store import TrajectoryStore

_FETCH_SECONDS = 15.0
_CHUNK_BYTES = 2**16
_MAX_CACHED_BYTES = 64 * 2**20
_MAX_CACHED_ADDRESSES = 4096
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# Python considers some of these global. Tunnels can reach any IPv4 network.
_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "168.63.129.16/32",  # the host of an Azure machine
        "192.0.0.0/24",  # protocol assignments; the metadata service of Oracle's cloud
        "192.88.99.0/24",  # 6to4 relays
    )
]


class ImageLibrary:
    """The images of all rollouts of a process; each is fetched and stored once.

    Args:
        store: holds the images.
        max_bytes: the largest image accepted.
        networks: networks that may be connected to in addition to the public ones.
    """

    def __init__(
        self, store: TrajectoryStore, max_bytes: int, networks: Sequence[_Network] = ()
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._networks = networks
        self._fetched: OrderedDict[str, str] = OrderedDict()
        self._inlined: OrderedDict[str, str] = OrderedDict()
        self._inlined_bytes = 0

    async def keep(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Store images and return their addresses there."""
        return tuple([await self._keep(address) for address in addresses])

    async def inlined(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return stored images as `data:` URLs, in the order of their addresses."""
        urls = {address: self._inlined.get(address) for address in addresses}
        missing = [address for address, url in urls.items() if url is None]
        found = await self._store.images.get(missing) if missing else ()
        for address, image in zip(missing, found, strict=True):
            urls[address] = image.data_url
            self._cache(address, image.data_url)
        return tuple(url for address in addresses if (url := urls[address]) is not None)

    async def _keep(self, address: str) -> str:
        if stored_key(address) is not None:
            return address
        if address in self._fetched:
            return self._fetched[address]
        try:
            image = await self._read(address)
        except ValueError as error:
            raise RenderError(f"image {_shortened(address)}: {error}") from None
        (stored,) = await self._store.images.put([image])
        if not address.startswith("data:"):
            self._fetched[address] = stored
            if len(self._fetched) > _MAX_CACHED_ADDRESSES:
                self._fetched.popitem(last=False)
        return stored

    async def _read(self, address: str) -> Image:
        if address.startswith("data:"):
            image = image_from_data_url(address)
        elif address.startswith(("http://", "https://")):
            image = image_from_bytes(
                await _fetch(address, max_bytes=self._max_bytes, networks=self._networks)
            )
        else:
            raise ValueError("not a data: URL or http(s) address")
        if len(image.data) > self._max_bytes:
            raise ValueError(f"larger than max_image_megabytes={self._max_bytes / 2**20:g}")
        return image

    def _cache(self, address: str, url: str) -> None:
        self._inlined[address] = url
        self._inlined_bytes += len(url)
        while self._inlined_bytes > _MAX_CACHED_BYTES and len(self._inlined) > 1:
            self._inlined_bytes -= len(self._inlined.popitem(last=False)[1])


def _shortened(address: str) -> str:
    return address if len(address) <= 80 else f"{address[:77]}..."


async def _fetch(url: str, *, max_bytes: int, networks: Sequence[_Network]) -> bytes:
    """Return the content of an http(s) address."""
    connector = aiohttp.TCPConnector(socket_factory=lambda info: _checked_socket(info, networks))
    timeout = aiohttp.ClientTimeout(_FETCH_SECONDS)
    data = bytearray()
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            # The limit counts bytes as they arrive, so compressed bodies are refused.
            http.get(
                url, raise_for_status=True, headers={"accept-encoding": "identity"}
            ) as response,
        ):
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise ValueError(f"was sent compressed ({encoding})")
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                data += chunk
                if len(data) > max_bytes:
                    raise ValueError(f"larger than max_image_megabytes={max_bytes / 2**20:g}")
    except aiohttp.ClientConnectorError as error:
        raise ValueError(f"cannot be fetched ({error.os_error.strerror})") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = getattr(error, "status", None) or type(error).__name__
        raise ValueError(f"cannot be fetched ({reason})") from error
    return bytes(data)


def _checked_socket(info: tuple[Any, ...], networks: Sequence[_Network]) -> socket.socket:
    """Return a socket for an address; raises PermissionError for one that may not be connected to."""
    family, kind, protocol, _, address = info
    if not _is_allowed(address[0], networks):
        raise PermissionError(errno.EACCES, "not a public address, and not in image_networks")
    return socket.socket(family, kind, protocol)


def _is_allowed(text: str, networks: Sequence[_Network]) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return _is_public(address) or any(address in network for network in networks)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    is_reserved = any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not address.is_multicast and not is_reserved

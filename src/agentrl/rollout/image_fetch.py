"""Images from the web, by addresses that a question or an agent's message names.

Nobody vouches for such an address, and a sampler often stands where a metadata service, a database
or a neighbour's notebook can be reached. So only public addresses are connected to, and the networks
that the user names. It is the connection that is checked, not the name: redirects, and names that
resolve to a private address, are held to it too.
"""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import aiohttp

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_FETCH_SECONDS = 15.0
_CHUNK_BYTES = 2**16


async def fetch_image(url: str, *, max_bytes: int, networks: Sequence[Network]) -> bytes:
    """Return what an http(s) address holds.

    Args:
        url: the address.
        max_bytes: the most that is read.
        networks: networks that may be connected to beside the public ones.

    Raises:
        ValueError: it cannot be had within 15 seconds, is larger, or lies where it may not.
    """
    connector = aiohttp.TCPConnector(socket_factory=lambda info: _socket(info, networks))
    timeout = aiohttp.ClientTimeout(_FETCH_SECONDS)
    data = bytearray()
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            http.get(url, raise_for_status=True) as response,
        ):
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


def _socket(info: tuple[Any, ...], networks: Sequence[Network]) -> socket.socket:
    """Return a socket for an address that may be connected to."""
    family, kind, protocol, _, place = info
    if not _is_allowed(place[0], networks):
        raise PermissionError(errno.EACCES, "not a public address, and not in --image_networks")
    return socket.socket(family, kind, protocol)


def _is_allowed(text: str, networks: Sequence[Network]) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    is_public = address.is_global and not address.is_multicast
    return is_public or any(address in network for network in networks)

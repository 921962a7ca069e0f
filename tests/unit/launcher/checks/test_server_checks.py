"""Addresses of inference servers at which something else answers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pydantic import SecretStr

from agentrl.config.sections import InferenceSection
from agentrl.errors import ConfigError
from agentrl.launcher.checks.server_checks import check_servers, open_servers


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    try:
        while True:
            writer.write(b" " * 2**16)
            await writer.drain()
    except ConnectionError:
        writer.close()


async def test_an_answer_without_an_end_is_not_waited_for() -> None:
    async with await asyncio.start_server(flood, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(20):
            with pytest.raises(ConfigError, match="is not an inference server"):
                await check_servers(InferenceSection(inference_urls=(url,)))


def answering(*, needs_key: bool) -> Callable[..., Awaitable[None]]:
    """Return a server that reports its model, to all or to those with a key."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_refused = needs_key and b"authorization: bearer" not in head.lower()
        status = b"401 Unauthorized" if is_refused else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\n{}" % status)
        writer.close()

    return answer


async def test_servers_that_ask_for_no_key_are_found() -> None:
    async with (
        await asyncio.start_server(answering(needs_key=False), "127.0.0.1", 0) as no_key,
        await asyncio.start_server(answering(needs_key=True), "127.0.0.1", 0) as with_key,
    ):
        urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in (no_key, with_key)]
        # A key that the run sends changes nothing where no server checks it.
        section = InferenceSection(inference_urls=tuple(urls), inference_api_key=SecretStr("k"))
        await check_servers(section)
        assert await open_servers(urls) == urls[:1]

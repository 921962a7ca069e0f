"""Addresses of inference servers at which something else answers."""

import asyncio

import pytest

from agentrl.config.sections import InferenceSection
from agentrl.errors import ConfigError
from agentrl.launcher.checks.server_checks import check_servers


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

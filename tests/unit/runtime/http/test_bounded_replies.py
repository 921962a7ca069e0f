"""Replies of servers that are not ours are read within bounds of size, time and density."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from agentrl.errors import UnreadableReply
from agentrl.runtime.http.bounded_replies import NOT_COMPRESSED, json_of, read_reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def server(reply: bytes, more: bytes = b"") -> AsyncIterator[str]:
    """Serve one reply; `more` follows it again and again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        try:
            while more:
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.005)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"


async def read(url: str) -> tuple[int, bytes]:
    async with httpx.AsyncClient(headers=NOT_COMPRESSED, trust_env=False) as client:
        return await read_reply(client, "GET", url, max_bytes=2**20, seconds=1.0)


async def test_an_ordinary_reply_is_returned() -> None:
    async with server(HEAD + b"Content-Length: 2\r\n\r\n{}") as url:
        assert await read(url) == (200, b"{}")


async def test_a_compressed_reply_is_not_unpacked() -> None:
    packed = gzip.compress(b" " * 2**20)
    head = HEAD + f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    async with server(head + packed) as url:
        with pytest.raises(UnreadableReply, match=r"compressed \(gzip\)"):
            await read(url)


async def test_a_reply_without_an_end_is_given_up() -> None:
    async with server(HEAD + b"\r\n", more=b"x" * 2**17) as url:
        with pytest.raises(UnreadableReply, match="longer than 1 MiB"):
            await read(url)


async def test_a_reply_in_drops_has_a_deadline() -> None:
    async with server(HEAD + b"\r\n", more=b" ") as url:
        with pytest.raises(TimeoutError):
            await read(url)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"[" + b"0," * 300_001 + b"0]", "300000 commas and brackets"),
        (b'"\\ud83d"', "not JSON"),
        (b"<html>", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_what_is_no_json_or_holds_too_much_is_named_in_one_line(text: bytes, reason: str) -> None:
    with pytest.raises(UnreadableReply, match=reason) as failed:
        json_of(text)
    assert "\n" not in str(failed.value)

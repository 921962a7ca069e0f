"""Requests that begin and do not end hold no connection; ordinary ones are answered meanwhile."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.runtime.http import http_servers
from agentrl.runtime.http.http_servers import serve_until_signalled, server_config

HEAD = b"POST /%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(http: Request) -> Response:
    return JSONResponse(len(await http.body()))


async def _answer_early(_: Request) -> Response:
    return JSONResponse("no", 401)


async def _answer_slowly(http: Request) -> Response:
    await http.body()
    await asyncio.sleep(1.0)
    return JSONResponse("at last")


async def _answer_in_pieces(http: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    await http.body()
    return StreamingResponse(pieces())


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http_servers, "HEAD_SECONDS", 0.6)
    monkeypatch.setattr(http_servers, "BODY_SECONDS", 1.5)
    routes = [
        Route("/", _answer, methods=["POST"]),
        Route("/early", _answer_early, methods=["POST"]),
        Route("/slow", _answer_slowly, methods=["POST"]),
        Route("/stream", _answer_in_pieces, methods=["POST"]),
    ]
    server = _Server(server_config(Starlette(routes=routes), grace_seconds=1))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def _left_open(port: int, sent: bytes) -> bytes:
    """Send the beginning of a request; return what comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(20):
        said = await reader.read()
    writer.close()
    return said


@pytest.mark.parametrize("sent", [b"", b"POST / HT", HEAD % b"", HEAD % b"" + b"\r\n{", b"\r\n"])
async def test_connections_with_half_a_request_are_closed(port: int, sent: bytes) -> None:
    halves = [asyncio.create_task(_left_open(port, sent)) for _ in range(40)]
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=b"x" * 30_000)
    assert answer.json() == 30_000
    assert await asyncio.gather(*halves) == [b""] * 40


async def test_a_head_without_an_end_is_not_kept(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_servers, "HEAD_SECONDS", 60.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for number in range(2_000):
            writer.write(
                b"POST / HTTP/1.1\r\n" if number == 0 else b"x-more: " + b"y" * 1000 + b"\r\n"
            )
            await writer.drain()
        async with asyncio.timeout(20):
            await reader.read()
    writer.close()


CALL = b"POST /%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("way", [b"slow", b"stream", b"early"])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        pytest.param(CALL[:20], b"x-more: " + b"y" * 1000 + b"\r\n", id="an endless head"),
        pytest.param(b"", CALL % b"slow", id="calls"),
        pytest.param(HEAD % b"slow" + b"\r\n", b"z" * 1000, id="a body"),
    ],
)
async def test_little_is_kept_of_what_comes_before_the_answer(
    port: int, way: bytes, start: bytes, more: bytes
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CALL % way + start)
    await asyncio.sleep(0.05)  # the call is read before the rest comes
    num_bytes = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(10):
            while num_bytes < 64 << 20:
                writer.write(more)
                num_bytes += len(more)
                await writer.drain()
    writer.close()
    assert num_bytes < 16 << 20  # the kernel's buffers take some


async def test_calls_that_come_before_the_answer_are_answered(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CALL % b"slow" + CALL % b"" + CALL % b"early")
    said = b""
    async with asyncio.timeout(20):
        while b'"no"' not in said:
            said += await reader.read(1000)
    writer.close()
    assert said.count(b"HTTP/1.1 ") == 3
    assert said.index(b"at last") < said.index(b"\r\n\r\n2") < said.index(b'"no"')


async def test_an_early_answer_arrives_while_the_body_is_still_sent(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(2):
            answer = await client.post(f"http://127.0.0.1:{port}/early", content=b"x" * 3_000_000)
            assert answer.status_code == 401


async def test_an_interrupt_before_the_start_starts_nothing() -> None:
    begun = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        begun.append(scope["type"])
        await receive()

    async def interrupted(listener: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as `asyncio.run` does on Ctrl-C
        config = uvicorn.Config(app, lifespan="on")
        await serve_until_signalled(config, listener, lambda: begun.append("ready"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(interrupted(listener))
        await asyncio.sleep(0)
    assert begun == []

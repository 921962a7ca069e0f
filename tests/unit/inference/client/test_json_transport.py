"""What a server sends instead of an answer is an `InferenceError`, in bounded memory."""

import asyncio
import gzip
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import strategies as st
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from support.fuzzing import TryCases
from support.stub_server import generation, stub_server

from agentrl.errors import InferenceError, ServerLost, ServerRefused, ServerUnreachable
from agentrl.inference.client import json_transport
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateRequest, parse_partial, parse_result
from agentrl.schema import SamplingParams

REQUEST = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=10))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


async def endless() -> AsyncIterator[bytes]:
    yield b"data: "
    while True:
        yield b"x" * 2**18
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: StreamingResponse(endless()), "more than 1 MiB"),
        (
            lambda: Response(gzip.compress(b" " * 2**20), headers={"Content-Encoding": "gzip"}),
            r"compressed body \(gzip\)",
        ),
        (lambda: Response(b"data: 7\n\n"), "not a JSON object"),
        (lambda: Response(b"data: " + b"[" * 100_000 + b"\n\n"), "not a JSON object"),
        (lambda: StreamingResponse(endless(), 500), "more than 1 MiB"),
    ],
)
async def test_what_is_no_answer_is_an_error_that_names_the_server(
    monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str, *, stream: bool
) -> None:
    monkeypatch.setattr(json_transport, "_MAX_REPLY_BYTES", 2**20)

    async def serve(_: dict[str, Any]) -> Response:
        sent: Response = answer()
        return sent

    async with stub_server(serve) as server, SGLangClient(server.url) as client:
        with pytest.raises(InferenceError, match=reason) as failed:
            await client.generate(REQUEST, (lambda _: None) if stream else None)
    assert server.url in str(failed.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_redirects_sends_no_prompt_elsewhere(*, stream: bool) -> None:
    async def elsewhere(_: dict[str, Any]) -> Response:
        return JSONResponse(generation([7]))

    async with stub_server(elsewhere) as other:

        async def redirect(_: dict[str, Any]) -> Response:
            return RedirectResponse(f"{other.url}/generate", 307)

        async with stub_server(redirect) as server, SGLangClient(server.url) as client:
            with pytest.raises(ServerRefused, match="answered 307"):
                await client.generate(REQUEST, (lambda _: None) if stream else None)
    assert other.bodies == []


BODIES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("output_ids", "meta_info"), anything | st.lists(st.integers() | st.floats())
    ),
)
META = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            *("finish_reason", "prompt_tokens", "cached_tokens", "num_retractions"),
            *("weight_version", "weight_versions", "output_token_logprobs", "routed_experts"),
        ),
        anything,
    ),
)


@pytest.mark.fuzz(50)
def test_any_generation_is_read_or_refused(try_cases: TryCases) -> None:
    def check(fields: dict[str, Any], meta: dict[str, Any]) -> None:
        body = generation([7, 8], **meta) | fields
        for read in (parse_result, parse_partial):
            try:
                result = read(body, "http://server")
            except InferenceError:
                continue
            assert len(result.output_ids) == len(result.output_logprobs)

    try_cases(check, fields=BODIES, meta=META)


async def test_a_server_that_resets_the_connection_is_lost_with_the_request() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        at_once = struct.pack("ii", 1, 0)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.close()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with SGLangClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(ServerLost, match="closed the connection"):
                await client.generate(REQUEST)


async def test_a_server_that_is_not_there_is_unreachable(unused_tcp_port: int) -> None:
    async with SGLangClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(ServerUnreachable, match="check that the server is running") as failed:
            await client.generate(REQUEST)
    assert not isinstance(failed.value, ServerLost)

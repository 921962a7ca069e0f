"""Requests under which servers die. The servers are on real sockets, and drop their connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response
from support.patience import PATIENCE
from support.stub_server import generation, stub_server

from agentrl.errors import NoServerAvailable, PoisonousRequest
from agentrl.inference.client.pool import ServerPool
from agentrl.inference.wire import GenerateRequest, GenerateResult
from agentrl.schema import InferenceService, SamplingParams

WELL = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=10, seed=1))
POISON = WELL.model_copy(update={"input_ids": WELL.input_ids + 1})


class Mortal:
    """A server that ends every connection when one of its requests is the poison."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.deaths = 0
        self.is_cut_off = False
        """Whether something on the way accepts connections and ends them, as a proxy may."""
        self.num_cut = 0
        self._seconds = seconds
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if self.is_cut_off:
                    self.num_cut += 1
                    return
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                body = await reader.readexactly(length)
                await asyncio.sleep(self._seconds)
                if b"[2,3,4]" in body:
                    self.deaths += 1
                    for other in self._writers:
                        other.transport.abort()
                    return
                answer = JSONResponse(generation([7, 8])).body
                size = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n"
                writer.write(size.encode() + bytes(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()


@asynccontextmanager
async def pool_over(*servers: Mortal, no_server_seconds: float = 60.0) -> AsyncIterator[ServerPool]:
    listening = [await asyncio.start_server(s.serve, "127.0.0.1", 0) for s in servers]
    try:
        async with ServerPool(no_server_seconds=no_server_seconds) as pool:
            pool.update([service(server.sockets[0].getsockname()[1]) for server in listening])
            yield pool
    finally:
        for server in listening:
            server.close()


def service(port: int) -> InferenceService:
    url = f"http://127.0.0.1:{port}"
    return InferenceService(id=url, base_url=url, backend="embedded", model_path="m", status="up")


async def test_a_request_that_kills_is_sent_twice_and_its_neighbors_live() -> None:
    first, second = Mortal(), Mortal()
    async with pool_over(first, second) as pool:
        asked = [WELL, POISON, WELL, WELL, WELL, WELL]
        results = await asyncio.gather(
            *(pool.generate(f"record {n}", one) for n, one in enumerate(asked)),
            return_exceptions=True,
        )
    poisoned = results.pop(1)
    assert isinstance(poisoned, PoisonousRequest)
    assert "this request crashes servers" in str(poisoned)
    answers = [result for result in results if isinstance(result, GenerateResult)]
    assert [list(answer.output_ids) for answer in answers] == [[7, 8]] * 5
    assert first.deaths + second.deaths == 2


async def test_connections_that_something_on_the_way_ends_are_no_deaths() -> None:
    server = Mortal()
    server.is_cut_off = True
    async with pool_over(server) as pool:
        asked = [asyncio.create_task(pool.generate(f"record {n}", WELL)) for n in range(3)]
        async with asyncio.timeout(PATIENCE):
            # Each was sent, and none again before something answers.
            while server.num_cut < 8 and not any(one.done() for one in asked):
                await asyncio.sleep(0.02)
        server.is_cut_off = False
        answers = await asyncio.gather(*asked)
    assert [list(answer.output_ids) for answer in answers] == [[7, 8]] * 3


async def test_where_no_server_answers_no_request_is_to_blame() -> None:
    server = Mortal()
    server.is_cut_off = True
    async with pool_over(server, no_server_seconds=0.5) as pool:
        with pytest.raises(NoServerAvailable, match=r"no inference server responded for 0\.5 s"):
            await pool.generate("record", WELL)
        server.is_cut_off = False
        assert (await pool.generate("record", WELL)).output_ids.tolist() == [7, 8]


async def test_a_request_in_quarantine_is_not_sent_whatever_its_seed() -> None:
    server = Mortal()
    async with pool_over(server) as pool:
        with pytest.raises(PoisonousRequest):
            await pool.generate("record", POISON)
        reseeded = POISON.sampling.model_copy(update={"seed": 2})
        with pytest.raises(PoisonousRequest):
            await pool.generate("other", POISON.model_copy(update={"sampling": reseeded}))
        assert server.deaths == 2
        assert (await pool.generate("other", WELL)).output_ids.tolist() == [7, 8]


async def test_a_request_that_fails_in_two_servers_is_not_sent_again() -> None:
    async def fail(_: dict[str, Any]) -> Response:
        return JSONResponse({"object": "error", "message": "cannot compute", "code": 500}, 500)

    async with stub_server(fail) as stub, ServerPool() as pool:
        pool.update([service(int(stub.url.rpartition(":")[2]))])
        with pytest.raises(PoisonousRequest, match="cannot compute"):
            await pool.generate("record", WELL)
        assert len(stub.bodies) == 2

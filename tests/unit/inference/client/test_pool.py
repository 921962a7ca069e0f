"""Generations over several servers, some of which misbehave. The servers are on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from support.stub_server import StubServer, generation, stub_server

from agentrl.errors import InferenceError, NoServerAvailable, ServerRefused
from agentrl.inference.client.pool import ServerPool
from agentrl.inference.wire import GenerateRequest, GenerateResult
from agentrl.schema import InferenceService, SamplingParams, ServiceStatus
from agentrl.schema.grammar import Grammar

REQUEST = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=10))


def service(url: str, status: ServiceStatus = "up") -> InferenceService:
    return InferenceService(id=url, base_url=url, backend="embedded", model_path="m", status=status)


async def well(_: dict[str, Any]) -> Response:
    return JSONResponse(generation([7, 8]))


async def overloaded(_: dict[str, Any]) -> Response:
    return JSONResponse({"object": "error", "message": "queue full", "code": 503}, 503)


@pytest.fixture
async def pool() -> AsyncIterator[ServerPool]:
    async with ServerPool() as opened:
        yield opened


@pytest.fixture
async def pair() -> AsyncIterator[tuple[StubServer, StubServer]]:
    async with stub_server(well) as first, stub_server(well) as second:
        yield first, second


async def test_conversation_stays_with_its_server(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    pool.update([service(stub.url) for stub in pair])
    servers = {(await pool.generate("record", REQUEST)).server for _ in range(6)}
    assert len(servers) == 1


async def test_conversations_spread_over_servers(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    async def slowly(_: dict[str, Any]) -> Response:
        await asyncio.sleep(0.05)
        return await well(_)

    for stub in pair:
        stub.answer = slowly
    pool.update([service(stub.url) for stub in pair])
    await asyncio.gather(*(pool.generate(f"record {n}", REQUEST) for n in range(10)))
    assert [len(stub.bodies) for stub in pair] == [5, 5]


async def test_priorities_are_sent_where_all_servers_follow_them(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    orderly = [service(stub.url).model_copy(update={"takes_priorities": True}) for stub in pair]
    request = REQUEST.model_copy(update={"priority": -3})
    sent = []
    for services in (orderly, [orderly[0], service(pair[1].url)], [orderly[0]]):
        pool.update(services)
        await pool.generate("record", request)
        sent.append([body.get("priority") for stub in pair for body in stub.bodies][-1])
        for stub in pair:
            stub.bodies.clear()
    assert sent == [-3, None, -3]


async def test_lost_server_is_left(pool: ServerPool, pair: tuple[StubServer, StubServer]) -> None:
    pool.update([service("http://127.0.0.1:9"), service(pair[0].url)])
    async with asyncio.timeout(20):
        results = [await pool.generate(f"record {n}", REQUEST) for n in range(20)]
    assert {result.server for result in results} == {pair[0].url}


async def test_overloaded_server_is_left_for_another(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    pair[0].answer = overloaded
    pool.update([service(stub.url) for stub in pair])
    async with asyncio.timeout(20):
        results = [await pool.generate(f"record {n}", REQUEST) for n in range(20)]
    assert {result.server for result in results} == {pair[1].url}
    assert len(pair[0].bodies) <= 2


async def test_busy_server_is_asked_again(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    stub = pair[0]

    async def well_at_last(body: dict[str, Any]) -> Response:
        return await (overloaded if len(stub.bodies) < 3 else well)(body)

    stub.answer = well_at_last
    pool.update([service(stub.url)])
    assert (await pool.generate("record", REQUEST)).output_ids.tolist() == [7, 8]
    assert len({body["rid"] for body in stub.bodies}) == 3


async def test_refused_request_is_not_repeated(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    async def refuse(_: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "too long"}}, 400)

    pair[0].answer = refuse
    pool.update([service(pair[0].url)])
    with pytest.raises(ServerRefused, match="too long"):
        await pool.generate("record", REQUEST)
    assert len(pair[0].bodies) == 1


async def test_a_prompt_of_a_million_bytes_is_sent_whole(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    long = REQUEST.model_copy(update={"input_ids": np.arange(300_000, dtype=np.int32)})
    pool.update([service(pair[0].url)])
    await pool.generate("record", long)
    assert pair[0].bodies[0]["input_ids"] == list(range(300_000))


async def test_a_request_with_half_a_surrogate_pair_fails_in_one_line(pool: ServerPool) -> None:
    pool.update([service("http://127.0.0.1:9")])
    request = GenerateRequest(input_ids=[1], sampling=SamplingParams(stop=("\ud800",)))
    with pytest.raises(
        InferenceError, match=r"cannot send the request to \S+/generate: it is not valid JSON"
    ):
        await pool.generate("record", request)


async def test_cut_generation_is_resumed_from_its_tokens(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    stub = pair[0]

    async def cut_twice(_: dict[str, Any]) -> Response:
        parts = [
            generation([4, 5], kind="abort", version="1"),
            generation([], kind="abort", version="1"),
            generation([6], version="2"),
        ]
        return JSONResponse(parts[len(stub.bodies) - 1])

    stub.answer = cut_twice
    pool.update([service(stub.url)])
    image = "data:image/png;base64,AA=="
    result = await pool.generate("record", REQUEST.model_copy(update={"image_data": (image,)}))
    assert [body["image_data"] for body in stub.bodies] == [[image]] * 3
    assert result.output_ids.tolist() == [4, 5, 6]
    assert result.finish_reason == "stop"
    assert [(s.version, s.start, s.end) for s in result.version_spans] == [(1, 0, 2), (2, 2, 3)]
    assert [body["input_ids"] for body in stub.bodies] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5],
    ]
    assert [b["sampling_params"]["max_new_tokens"] for b in stub.bodies] == [10, 8, 8]


async def test_generation_cut_at_its_last_token_ended_by_length(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    async def cut(_: dict[str, Any]) -> Response:
        return JSONResponse(generation(list(range(10)), kind="abort"))

    pair[0].answer = cut
    pool.update([service(pair[0].url)])
    result = await pool.generate("record", REQUEST)
    assert (len(result.output_ids), result.finish_reason) == (10, "length")


async def test_generation_waits_for_a_server_to_come_up(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    pool.update([service(pair[0].url, "down")])
    waiting = asyncio.create_task(pool.generate("record", REQUEST))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    pool.update([service(pair[0].url, "down"), service(pair[1].url)])
    assert (await waiting).server == pair[1].url


async def test_no_server_is_an_error_after_a_while() -> None:
    async with ServerPool(no_server_seconds=0.1) as pool:
        with pytest.raises(NoServerAvailable):
            await pool.generate("record", REQUEST)


async def test_generation_on_a_server_that_hangs_is_given_up_when_it_is_down(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    hanging, other = pair
    asked, released = asyncio.Event(), asyncio.Event()

    async def hang(body: dict[str, Any]) -> Response:
        asked.set()
        await released.wait()
        return await well(body)

    hanging.answer = hang
    pool.update([service(hanging.url)])
    waiting = asyncio.create_task(pool.generate("record", REQUEST))
    await asked.wait()
    pool.update([])  # silence of its supervisor alone is no reason
    pool.update([service(hanging.url, "updating")])
    assert not waiting.done()
    pool.update([service(hanging.url, "down"), service(other.url)])
    assert (await waiting).server == other.url
    # It comes back and is used again.
    hanging.answer = well
    pool.update([service(hanging.url), service(other.url, "down")])
    assert (await pool.generate("record", REQUEST)).server == hanging.url
    released.set()


async def test_servers_get_work_in_proportion_to_their_speed(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    """The servers are stand-ins: two real engines on the same cores have the same speed.

    Their times are long beside what a busy machine adds to each.
    """
    for stub, seconds in zip(pair, (0.2, 0.6), strict=True):

        async def answer(body: dict[str, Any], seconds: float = seconds) -> Response:
            await asyncio.sleep(seconds)
            return await well(body)

        stub.answer = answer
    pool.update([service(stub.url) for stub in pair])
    ends_at = asyncio.get_running_loop().time() + 6

    async def play(record: int) -> None:
        turn = 0
        while asyncio.get_running_loop().time() < ends_at:
            await pool.generate(f"record {record}/{turn // 5}", REQUEST)
            turn += 1

    await asyncio.gather(*(play(record) for record in range(16)))
    fast, slow = (len(stub.bodies) for stub in pair)
    assert 2 < fast / slow < 4.5


def stream_of(*frames: dict[str, Any], done: bool = True) -> Response:
    ends = ["[DONE]"] if done else []
    data = [*(json.dumps(frame) for frame in frames), *ends]
    return StreamingResponse((f"data: {each}\n\n" for each in data), media_type="text/event-stream")


def partial(ids: list[int]) -> dict[str, Any]:
    body = generation(ids)
    body["meta_info"]["finish_reason"] = None
    return body


async def test_a_listener_is_told_how_far_a_generation_got(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    async def in_pieces(_: dict[str, Any]) -> Response:
        return stream_of(partial([7]), partial([7, 8]), generation([7, 8, 9]))

    pair[0].answer = in_pieces
    pool.update([service(pair[0].url)])
    told: list[list[int]] = []
    result = await pool.generate("record", REQUEST, lambda part: told.append([*part.output_ids]))
    assert told == [[7], [7, 8]]
    assert (result.output_ids.tolist(), result.finish_reason) == ([7, 8, 9], "stop")
    assert pair[0].bodies[0]["stream"] is True


async def test_tokens_that_were_told_of_stay_when_their_server_is_lost(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    stub = pair[0]

    async def lost_at_first(_: dict[str, Any]) -> Response:
        if len(stub.bodies) == 1:
            return stream_of(partial([4, 5]), done=False)
        if len(stub.bodies) == 2:
            return stream_of({"error": {"message": "shutting down", "code": 503}})
        return stream_of(partial([6]), generation([6, 7], version="2"))

    stub.answer = lost_at_first
    pool.update([service(stub.url)])
    told: list[list[int]] = []
    result = await pool.generate("record", REQUEST, lambda part: told.append([*part.output_ids]))
    assert told == [[4, 5], [4, 5, 6]]
    assert result.output_ids.tolist() == [4, 5, 6, 7]
    assert [span.version for span in result.version_spans] == [0, 2]
    assert [body["input_ids"] for body in stub.bodies] == [[1, 2, 3], *[[1, 2, 3, 4, 5]] * 2]
    assert stub.bodies[2]["sampling_params"]["max_new_tokens"] == 8


async def test_a_refusal_within_a_stream_is_not_repeated(
    pool: ServerPool, pair: tuple[StubServer, StubServer]
) -> None:
    async def refuse(_: dict[str, Any]) -> Response:
        return stream_of({"error": {"message": "too long", "code": 400}})

    pair[0].answer = refuse
    pool.update([service(pair[0].url)])
    with pytest.raises(ServerRefused, match="too long"):
        await pool.generate("record", REQUEST, lambda _: None)
    assert len(pair[0].bodies) == 1


async def test_a_reply_held_to_a_grammar_begins_anew_when_it_was_cut(pool: ServerPool) -> None:
    bodies: list[dict[str, Any]] = []

    async def cuts_once(body: dict[str, Any]) -> Response:
        bodies.append(body)
        return JSONResponse(generation([7, 8], "abort" if len(bodies) == 1 else "stop"))

    grammar = Grammar(kind="regex", text="[0-9]+")
    sampling = REQUEST.sampling.model_copy(update={"grammar": grammar})
    told: list[GenerateResult] = []
    async with stub_server(cuts_once) as stub:
        pool.update([service(stub.url)])
        held = REQUEST.model_copy(update={"sampling": sampling})
        got = await pool.generate("record", held, told.append)
    assert [body["input_ids"] for body in bodies] == [[1, 2, 3]] * 2
    assert {body["sampling_params"]["regex"] for body in bodies} == {"[0-9]+"}
    assert got.output_ids.tolist() == [7, 8]
    assert told == []  # what was told of could not be taken back

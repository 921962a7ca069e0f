"""The server of an evaluated model is anybody's: what it answers is a reply or one of two errors."""

import json
from typing import Any

import httpx
import pytest

from agentrl.errors import APIError, InferenceError
from agentrl.rollout.evaluated_route import EvaluatedRoute


async def ask(response: httpx.Response) -> Any:
    transport = httpx.MockTransport(lambda _: response)
    async with httpx.AsyncClient(transport=transport) as client:
        return await EvaluatedRoute("http://critic/v1", "big", "", client).ask({"messages": []})


def streamed(content: bytes, *, status_code: int = 200, **more: Any) -> httpx.Response:
    return httpx.Response(status_code, stream=httpx.ByteStream(content), **more)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"choices": [' + b"0," * 400_000 + b"0]}",
        b'{"choices": [{"message": {"content": "\\ud83d"}}]}',
        b"null",
    ],
)
async def test_rubbish_is_a_failure_of_the_server(content: bytes) -> None:
    with pytest.raises(InferenceError, match="http://critic/v1"):
        await ask(streamed(content))


async def test_a_compressed_reply_is_not_unpacked() -> None:
    reply = streamed(b"x", headers={"content-encoding": "br"})
    with pytest.raises(InferenceError, match=r"compressed \(br\)"):
        await ask(reply)


async def test_what_a_server_says_of_an_error_is_cut_to_one_line() -> None:
    error = json.dumps({"error": {"message": "no\nsuch model " * 100_000}})
    with pytest.raises(APIError) as failed:
        await ask(streamed(error.encode(), status_code=404))
    assert len(str(failed.value)) <= 500
    assert "\n" not in str(failed.value)

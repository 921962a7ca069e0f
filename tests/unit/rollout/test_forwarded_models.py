"""Servers of other models are anybody's: whatever they answer is a reply or one of two errors."""

import json
from typing import Any

import httpx
import pytest

from agentrl.errors import APIError, InferenceError
from agentrl.rollout.forwarded_models import ForwardedModels


async def ask(response: httpx.Response) -> Any:
    transport = httpx.MockTransport(lambda _: response)
    async with httpx.AsyncClient(transport=transport) as client:
        models = ForwardedModels({"critic": {"base_url": "http://critic/v1"}}, client)
        return await models.ask("critic", {"messages": []})


def streamed(content: bytes, *, status_code: int = 200, **more: Any) -> httpx.Response:
    return httpx.Response(status_code, stream=httpx.ByteStream(content), **more)


def completion(**fields: Any) -> bytes:
    message = {"role": "assistant", "content": "hm"}
    return json.dumps({"choices": [{"message": message}], **fields}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"choices": [' + b"0," * 400_000 + b"0]}",
        completion(usage=["prompt_tokens"]),
        b'{"choices": [{"message": {"content": "\\ud83d"}}]}',
        b"null",
    ],
)
async def test_rubbish_is_a_failure_of_the_server(content: bytes) -> None:
    with pytest.raises(InferenceError, match="the server of 'critic'"):
        await ask(streamed(content))


async def test_a_compressed_reply_is_not_unpacked() -> None:
    reply = streamed(b"x", headers={"content-encoding": "br"})
    with pytest.raises(InferenceError, match=r"compressed \(br\)"):
        await ask(reply)


@pytest.mark.parametrize("count", [2**70, -1, "many", None, 1.5])
async def test_counts_that_cannot_be_are_none(count: object) -> None:
    reply = await ask(streamed(completion(usage={"prompt_tokens": count})))
    assert (reply.num_prompt_tokens, reply.message["content"]) == (0, "hm")


async def test_what_a_server_says_of_an_error_is_cut_to_one_line() -> None:
    error = json.dumps({"error": {"message": "no\nsuch model " * 100_000}})
    with pytest.raises(APIError) as failed:
        await ask(streamed(error.encode(), status_code=404))
    assert len(str(failed.value)) <= 500
    assert "\n" not in str(failed.value)

"""Random requests: each is answered, none with 500, and the engine goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from hypothesis import strategies as st
from starlette.requests import Request
from support.described import bodies, encoded
from support.fuzzing import TryCases

from agentrl.errors import APIError
from agentrl.inference.dialects.chat_completions import read_chat
from agentrl.inference.request_bodies import read_json_object
from agentrl.inference.wire import GenerateRequest, request_body
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_routes import make_app
from agentrl.schema import SamplingParams

JSON = {"Content-Type": "application/json"}
ANSWER_SECONDS = 20.0

edges = st.sampled_from(
    [0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 5e-324, 1e-7, 1e300]
)
numbers = edges | st.integers(-10, 300) | st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(max_size=20) | st.sampled_from(["", "\x00", "a" * 2000, "<|im_end|>"])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
ids = st.lists(st.integers(-2, 266) | edges, max_size=12)
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), numbers),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "sampling_seed"), numbers),
    "min_new_tokens": st.integers(-1, 4) | edges,
    "n": st.integers(0, 3) | edges,
    "stop": texts | st.lists(texts, max_size=3),
    "stop_token_ids": ids,
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | texts, numbers, max_size=3),
    "ignore_eos": st.booleans(),
}
noise = st.none() | anything


def loosely(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the fields, of which few hold something else entirely."""
    mostly = {name: st.one_of(value, value, value, noise) for name, value in fields.items()}
    return st.fixed_dictionaries({}, optional=mostly)


generate_bodies = st.builds(
    lambda fields, sampling, length: {
        **fields,
        "sampling_params": {**sampling, "max_new_tokens": length},
    },
    loosely(
        {
            "input_ids": ids | st.lists(ids, max_size=3),
            "text": texts | st.lists(texts, max_size=3),
            "rid": texts,
            "stream": st.booleans(),
            "return_logprob": st.booleans(),
            "logprob_start_len": st.integers(-3, 10) | edges,
            "extra_key": texts,
        }
    ),
    loosely(SAMPLING),
    st.integers(0, 6) | edges,
)
chat_bodies = st.builds(
    lambda fields: {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields},
    loosely(
        {
            "messages": st.lists(st.dictionaries(texts, anything, max_size=3), max_size=3),
            "temperature": numbers,
            "top_p": numbers,
            "top_k": numbers,
            "repetition_penalty": numbers,
            "seed": numbers,
            "stop": texts | st.lists(texts, max_size=3),
            "max_tokens": st.integers(1, 6) | edges,
            "response_format": anything,
            "tools": st.lists(anything, max_size=3),
            "tool_choice": anything,
        }
    ),
)


class Fuzzed:
    """An engine, and a loop in which requests are sent to it one by one."""

    def __init__(self, checkpoint: Path) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._open(checkpoint))

    async def _open(self, checkpoint: Path) -> None:
        self.engine = FrontEnd(
            EngineConfig(model_path=str(checkpoint)), load_model(checkpoint, torch.float32)
        )
        self.engine.start(lambda: None)
        transport = httpx.ASGITransport(make_app(self.engine), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=JSON
        )

    def post(self, body: object) -> httpx.Response:
        """Send a body, which may hold what JSON has no words for, and return the answer."""

        async def send() -> httpx.Response:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._client.post("/generate", content=encoded(body))

        answer = self._runner.run(send())
        assert self.engine.is_serving
        return answer

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self.engine.stop()
        self._runner.close()


@pytest.fixture(scope="module")
def fuzzed(checkpoint: Path) -> Iterator[Fuzzed]:
    opened = Fuzzed(checkpoint)
    yield opened
    opened.close()


def check(answer: httpx.Response, try_cases: TryCases, *allowed: int) -> None:
    try_cases.note_status(answer.status_code)
    assert answer.status_code in allowed, (answer.status_code, answer.text)
    assert '"code": 500' not in answer.text


@pytest.mark.fuzz(150)
def test_the_engine_answers_whatever_it_is_asked(fuzzed: Fuzzed, try_cases: TryCases) -> None:
    try_cases(lambda body: check(fuzzed.post(body), try_cases, 200, 400), body=generate_bodies)


@pytest.mark.fuzz(150)
def test_what_the_endpoint_lets_pass_the_engine_can_do(fuzzed: Fuzzed, try_cases: TryCases) -> None:
    def ask(body: dict[str, Any]) -> None:
        try:
            asked = read_chat(_as_received(body)).sampling
        except APIError as error:
            if error.status != 400:
                raise
            return
        params = SamplingParams(**asked.params, seed=asked.seed, stop=asked.stop, max_new_tokens=4)
        request = GenerateRequest(input_ids=[1, 2, 3], sampling=params)
        check(fuzzed.post(orjson.loads(orjson.dumps(request_body(request)))), try_cases, 200)

    try_cases(ask, body=chat_bodies)


@pytest.mark.fuzz(60)
def test_the_engine_answers_what_its_description_allows_and_what_it_does_not(
    fuzzed: Fuzzed, try_cases: TryCases
) -> None:
    def send(body: Any, length: int) -> None:
        # Bodies that ask for all that the context holds would be answered, too, only later.
        sampling = body.get("sampling_params") if isinstance(body, dict) else None
        for one in sampling if isinstance(sampling, list) else [sampling]:
            if isinstance(one, dict) and isinstance(one.get("max_new_tokens", 0), int):
                one["max_new_tokens"] = length
        check(fuzzed.post(body), try_cases, 200, 400, 503)

    described = bodies(make_app(fuzzed.engine), "/generate")
    try_cases(send, body=described, length=st.integers(0, 6))


def _as_received(body: object) -> Any:
    """Return a body as the server reads it."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": encoded(body), "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    return asyncio.run(read_json_object(request, 1 << 20))

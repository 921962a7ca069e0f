"""Random requests to the agents' endpoint, made from its own description: none ends in a 500."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.described import bodies, encoded
from support.fuzzing import TryCases

from agentrl.inference.dialects.api_server import DIALECTS, APIServer
from agentrl.inference.dialects.session import (
    ChatRequest,
    Completion,
    ModelSession,
    OnDelta,
    TextRequest,
)
from agentrl.inference.openapi import PATH

JSON = {"Content-Type": "application/json"}
ANSWER_SECONDS = 10.0


class Echo(ModelSession):
    """Answers every request with one word."""

    async def chat(self, request: ChatRequest, on_delta: OnDelta | None = None) -> Completion:
        return _completion(request)

    async def complete(self, request: TextRequest, on_delta: OnDelta | None = None) -> Completion:
        return _completion(request)

    async def count_tokens(self, request: ChatRequest) -> int:
        return 7


def _completion(request: ChatRequest | TextRequest) -> Completion:
    return Completion(
        id=request.id,
        created=request.created,
        model=request.model,
        message={"role": "assistant", "content": "hm"},
        finish_reason="stop",
        num_prompt_tokens=3,
        num_output_tokens=1,
    )


class Endpoint:
    """A server with one rollout, and a loop in which requests are sent to it one by one."""

    def __init__(self) -> None:
        server = APIServer("127.0.0.1", 1)
        self.app = server.app()
        self._runner = asyncio.Runner()
        self._session = Echo("m")
        self._serving = server.serve(self._session)
        self._runner.run(self._open())

    async def _open(self) -> None:
        await self._serving.__aenter__()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://127.0.0.1",
            headers={**JSON, "Authorization": f"Bearer {self._session.key}"},
        )

    def post(self, path: str, body: object) -> httpx.Response:
        async def send() -> httpx.Response:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._client.post(path, content=encoded(body))

        return self._runner.run(send())

    def get(self, path: str) -> Any:
        return self._runner.run(self._client.get(path)).json()

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.run(self._serving.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.close()


@pytest.mark.fuzz(15)
@pytest.mark.parametrize("path", [dialect.path for dialect in DIALECTS])
def test_what_the_description_allows_and_what_it_does_not_is_answered(
    endpoint: Endpoint, path: str, try_cases: TryCases
) -> None:
    def send(body: object) -> None:
        answer = endpoint.post(path, body)
        try_cases.note_status(answer.status_code)
        assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)

    try_cases(send, body=bodies(endpoint.app, path))


def test_the_description_names_every_route_and_the_fields_that_are_checked(
    endpoint: Endpoint,
) -> None:
    described = endpoint.get(PATH)
    assert {dialect.path for dialect in DIALECTS} <= described["paths"].keys()
    chat = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = chat["content"]["application/json"]["schema"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"maximum": 2.0, "minimum": 0.0, "type": "number"}

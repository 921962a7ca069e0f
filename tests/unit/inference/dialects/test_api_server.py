"""The server before any session: dialects, keys and errors."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from agentrl.errors import APIError
from agentrl.inference.dialects import api_server
from agentrl.inference.dialects.api_server import APIServer
from agentrl.inference.dialects.dialect import Dialect
from agentrl.inference.dialects.openai_common import REFUSED
from agentrl.inference.dialects.session import (
    ChatRequest,
    Completion,
    Delta,
    ModelSession,
    OnDelta,
    SamplingRequest,
    TextRequest,
)

JSON = {"Content-Type": "application/json"}


class Echo(ModelSession):
    """Says what it is told, in two parts."""

    async def chat(self, request: ChatRequest, on_delta: OnDelta | None = None) -> Completion:
        if request.messages[-1]["content"] == "fail":
            raise APIError("cannot be had", code="no_luck", param="messages")
        return self._answer(request, request.messages[-1]["content"], on_delta)

    async def complete(self, request: TextRequest, on_delta: OnDelta | None = None) -> Completion:
        assert isinstance(request.prompt, str)
        return self._answer(request, request.prompt, on_delta)

    def _answer(
        self, request: ChatRequest | TextRequest, text: str, on_delta: OnDelta | None
    ) -> Completion:
        if on_delta is not None:
            on_delta(Delta("content", text[:2]))
        message = {"role": "assistant", "content": text}
        return Completion(request.id, request.created, request.model, message, "stop", 3, 2)


@asynccontextmanager
async def client_of(session: ModelSession) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        APIServer.open("127.0.0.1") as server,
        server.serve(session) as endpoint,
        httpx.AsyncClient(
            base_url=endpoint.base_url,
            headers={"Authorization": f"Bearer {session.key}", "x-key": session.key},
        ) as client,
    ):
        yield client


@dataclass(frozen=True)
class ShoutingCall:
    """A call of a protocol that writes everything in capitals."""

    text: str
    session: ModelSession
    stream: bool = False

    async def run(self, on_delta: OnDelta | None) -> Completion:
        messages = ({"role": "user", "content": self.text},)
        return await self.session.chat(
            ChatRequest(
                model=self.session.model,
                messages=messages,
                tools=(),
                may_call=False,
                must_call=False,
                called_tool=None,
                json_schema=None,
                sampling=SamplingRequest(),
                raw={},
            ),
            on_delta,
        )

    def body(self, completion: Completion) -> dict[str, Any]:
        return {"shout": completion.message["content"].upper()}

    def delta_events(self, delta: Delta) -> Iterator[str]:
        yield delta.text.upper()

    def final_events(self, completion: Completion) -> Iterator[str]:
        yield "!"

    def error_events(self, error: APIError) -> Iterator[str]:
        yield str(error)


def read_shout(body: Mapping[str, Any], session: ModelSession) -> ShoutingCall:
    return ShoutingCall(body["say"], session, body.get("stream", False))


SHOUTING = Dialect(
    "/v1/shouts",
    read_shout,
    lambda error: {"WRONG": str(error).upper()},
    {"type": "object"},
    lambda headers: headers.get("x-key", ""),
)


async def test_a_further_dialect_is_a_module_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "DIALECTS", (*api_server.DIALECTS, SHOUTING))
    session = Echo("m")
    async with client_of(session) as client:
        whole = await client.post("/shouts", json={"say": "hello"})
        parts = await client.post("/shouts", json={"say": "hello", "stream": True})
        wrong = await client.post("/shouts", json={"say": "fail"})
        shared = client.base_url.copy_with(path="/v1/shouts")
        keyed = await client.post(shared, json={"say": "hi"}, headers={"x-key": session.key})
        unknown = await client.post(shared, json={"say": "hi"}, headers={"x-key": ""})
    assert (whole.json(), parts.text) == ({"shout": "HELLO"}, "HELLO!")
    assert (wrong.status_code, wrong.json()) == (400, {"WRONG": "CANNOT BE HAD"})
    assert keyed.json() == {"shout": "HI"}
    assert unknown.status_code == 401


@pytest.mark.parametrize(
    ("path", "asked", "kind", "text"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "chat", None),
        ("/completions", {"prompt": "hello"}, "text", "hello"),
    ],
)
async def test_a_stream_ends_with_usage_where_it_is_asked_for(
    path: str, asked: dict[str, Any], kind: str, text: str | None
) -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **asked}
    async with client_of(Echo("m")) as client:
        events = (await client.post(path, json=body)).text.split("\n\n")
        whole = (await client.post(path, json={"model": "m", **asked})).json()
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"total_tokens": 5' in events[-3]
    assert '"choices": []' in events[-3]
    assert whole["object"].startswith(kind)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0].get("text") == text


async def test_errors_have_openais_form_and_name_the_field() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "fail"}]}
    async with client_of(Echo("m")) as client:
        refused = await client.post("/chat/completions", json=body)
        malformed = await client.post("/chat/completions", content=b"{", headers=JSON)
        half = await client.post("/chat/completions", content=b'{"model": "\\ud800"}', headers=JSON)
        nowhere = await client.get("/nowhere")
    assert refused.json()["error"] == {
        "message": "cannot be had",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "no_luck",
    }
    assert "the body must be JSON" in malformed.json()["error"]["message"]
    assert "unpaired surrogate" in half.json()["error"]["message"]
    assert nowhere.status_code == 404
    assert nowhere.json()["error"]["message"].startswith("unknown route /")


@pytest.mark.parametrize(
    "field",
    [
        '"top_k": 18446744073709551615',
        f'"seed": {2**200}',
        f'"seed": {2**63}',
        '"repetition_penalty": 5e-324',
        '"temperature": NaN',
        '"temperature": 1e999',
        '"stop": [""]',
        '"stop": "\\ud800"',
        '"tools": ' + "[" * 800 + "]" * 800,
        '"tools": ' + "[" * 90_000 + "]" * 90_000,
        '"max_tokens": 1180591620717411303424',
    ],
)
async def test_what_no_server_can_do_is_refused_at_the_endpoint(field: str) -> None:
    content = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], {field}}}'
    async with client_of(Echo("m")) as client:
        answer = await client.post("/chat/completions", content=content, headers=JSON)
        assert answer.status_code == 400
        assert "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ({"logit_bias": {"7": 3}}, "another policy than the one that is trained"),
        ({"min_tokens": 4}, "where the policy ends it"),
        ({"ignore_eos": True}, "where the policy ends it"),
        ({"functions": [{"name": "look"}]}, "send them as tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "--chat_template_kwargs"),
        ({"structured_outputs": {"regex": "a+"}}, "response_format"),
        ({"continue_final_message": True}, "cannot be prefilled"),
        ({"stop_token_ids": [7]}, "send texts as stop"),
        ({"bad_words": ["no"]}, "the policy's own"),
        ({"regex": "a+"}, "response_format"),
        ({"truncate_prompt_tokens": 9}, "the whole prompt"),
        ({"prompt_logprobs": 1}, "logprobs of the prompt are not computed"),
        ({"prompt_logprobs": 0}, "logprobs of the prompt are not computed"),
        ({"include_stop_str_in_output": True}, "without its stop text"),
    ],
)
async def test_a_field_that_would_change_what_is_sampled_is_refused_by_name(
    field: dict[str, Any], instead: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    nothing = dict.fromkeys(field)
    async with client_of(Echo("m")) as client:
        refused = await client.post("/chat/completions", json={**body, **field})
        unsaid = await client.post("/chat/completions", json={**body, **nothing})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in field
    assert instead in refused.json()["error"]["message"]
    assert unsaid.status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/responses", {"model": "m", "input": "x"}),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
        ),
        (
            "/v1/messages/count_tokens",
            {"model": "m", "messages": [{"role": "user", "content": "x"}]},
        ),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_every_route_refuses_the_same_fields(route: str, body: dict[str, Any]) -> None:
    async with client_of(Echo("m")) as client:
        root = str(client.base_url).rstrip("/").removesuffix("/v1")
        for name in REFUSED:
            answer = await client.post(f"{root}{route}", json={**body, name: 1})
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["message"].startswith(f"{name}: not supported; ")


async def test_sampling_parameters_of_a_token_prompt_are_refused_like_fields() -> None:
    async with client_of(Echo("m")) as client:
        url = f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/inference/v1/generate"
        for name in REFUSED:
            body = {"token_ids": [5], "sampling_params": {name: 1}}
            error = (await client.post(url, json=body)).json()["error"]
            assert error["param"] == f"sampling_params.{name}"
            assert error["message"].startswith(f"sampling_params.{name}: not supported; ")


@pytest.mark.parametrize("prompt", ["[1180591620717411303424]", "[4294967296]", "[-1]", "[]"])
async def test_token_ids_beyond_the_machine_type_are_refused(prompt: str) -> None:
    async with client_of(Echo("m")) as client:
        answer = await client.post(
            "/completions", content=f'{{"model": "m", "prompt": {prompt}}}', headers=JSON
        )
        assert answer.status_code == 400


def _nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": _nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"enum": ["a" * 100_000]}, "characters"),
        ({"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(400)}}, "references"),
        (_nested(30), "nests deeper"),
        ({"anyOf": [{} for _ in range(2000)]}, "objects"),
    ],
)
async def test_a_schema_that_would_hurt_a_compiler_is_refused(
    schema: dict[str, Any], why: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    async with client_of(Echo("m")) as client:
        answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


async def test_arguments_that_nest_without_end_stay_text() -> None:
    arguments = "[" * 90_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "well"},
    ]
    async with client_of(Echo("m")) as client:
        answer = await client.post("/chat/completions", json={"model": "m", "messages": messages})
    assert answer.status_code == 200

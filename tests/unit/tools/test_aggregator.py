import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.errors import ConfigError, ToolError
from agentrl.tools import ToolsConfig, aggregator, connect_tools, load_mcp_servers, probe

ConfigFor = Callable[..., ToolsConfig]


async def endless(chunk: bytes) -> AsyncIterator[bytes]:
    while True:
        yield chunk
        await asyncio.sleep(0.1 if len(chunk) == 1 else 0)


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


@dataclass
class Manager:
    """A small AgentDock: two servers, whose tools answer what the tests ask them to."""

    tools: list[dict[str, Any]] = field(
        default_factory=lambda: [
            *map(function, ("web.search", "web.echo", "files.v2.echo", "files.v2.read_file"))
        ]
    )
    answers: dict[str, Any] = field(default_factory=dict)
    """What a tool answers: a body, a status, or seconds of silence."""
    called: list[tuple[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    async def servers(self, request: Request) -> Response:
        self.tokens.add(request.headers.get("authorization", ""))
        return JSONResponse({"servers": ["web", "files.v2", "empty"]})

    async def list(self, request: Request) -> Response:
        return JSONResponse({"tools": self.tools})

    async def call(self, request: Request) -> Response:
        name = request.path_params["name"]
        arguments = await request.json()
        self.called.append((name, arguments))
        answer = self.answers.get(name, {"content": arguments.get("text")})
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = {"content": "late"}
        if answer in ("drops", "flood"):
            return StreamingResponse(endless(b" " if answer == "drops" else b" " * 2**16))
        if answer == "gzip":
            return Response(
                gzip.compress(b'{"content": "x"}'), headers={"content-encoding": "gzip"}
            )
        if isinstance(answer, int):
            return JSONResponse({"detail": f"status {answer}"}, status_code=answer)
        if isinstance(answer, str):
            return Response(answer, media_type="text/html")
        return JSONResponse(answer)


@pytest.fixture
async def manager() -> AsyncIterator[Manager]:
    manager = Manager()
    app = Starlette(
        routes=[
            Route("/mcpapi/servers", manager.servers),
            Route("/mcpapi/tools", manager.list),
            Route("/mcpapi/tool/{name}", manager.call, methods=["POST"]),
        ]
    )
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    manager.url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcpapi"
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield manager
    server.should_exit = True
    await serving
    listener.close()


def test_the_end_of_an_address_makes_it_an_aggregator() -> None:
    def transport(url: str) -> str:
        return load_mcp_servers(url)["default"].transport

    assert transport("http://h:8080/container/abc/mcpapi") == "aggregator"
    assert transport("http://h:8080/mcpapi/?key=1") == "aggregator"
    assert transport("http://h:8080/mcp") == "http"
    assert load_mcp_servers({"a": {"url": "http://h/x", "type": "mcpapi"}})["a"].transport == (
        "aggregator"
    )


async def test_tools_of_all_servers_behind_it_are_offered_and_called(
    manager: Manager, config_for: ConfigFor
) -> None:
    async with connect_tools(config_for(manager.url, auth_token="s3cret")) as box:
        names = [spec.name for spec in box.specs]
        assert names == ["search", "web.echo", "files.v2.echo", "read_file"]
        assert [spec.server for spec in box.specs] == ["web", "web", "files.v2", "files.v2"]
        result = await box.call("files.v2.echo", {"text": "hällo"}, call_id="call_0_0")
        async with box.for_rollout() as mine:
            assert (await mine.call("search", {"text": "x"})).content == "x"
    assert (result.content, result.is_error, result.call_id) == ("hällo", False, "call_0_0")
    assert manager.called == [("files.v2.echo", {"text": "hällo"}), ("web.search", {"text": "x"})]
    assert manager.tokens == {"Bearer s3cret"}


@pytest.mark.parametrize(
    ("answer", "content", "is_error"),
    [
        ({"content": "text"}, "text", False),
        ({"content": {"price": 21, "näme": None}}, '{"price": 21, "näme": null}', False),
        ({"content": [1, 2]}, "[1, 2]", False),
        ({"content": None}, "null", False),
        ({"content": []}, "[]", False),
        (
            {
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJDRA=="}},
                    {"type": "image_url", "image_url": {"url": "http://h/a.png"}},
                ]
            },
            "look\n[image image/jpeg, 4 bytes, not shown]\n[image http://h/a.png, not shown]",
            False,
        ),
        ({"status_code": 500, "detail": "no such page", "headers": None}, "no such page", True),
        ({"status_code": 422, "detail": [{"msg": "required"}]}, '[{"msg": "required"}]', True),
        ({"content": {"error": "boom"}}, "boom", True),
        ({"content": {}}, "the tool returned nothing", True),
        ({"data": 1}, "Error: the tool's result is invalid: the answer has no content", True),
        ([[1]], "Error: the tool's result is invalid: the answer is not an object", True),
        ("<html>", "Error: the tool's result is invalid: the response is not JSON", True),
        (
            r'{"content": "cut \ud83d"}',
            "Error: the tool's result is invalid: the response is not JSON",
            True,
        ),
        (404, "status 404", True),
        (400, "status 400", True),
    ],
)
async def test_every_answer_becomes_an_observation(
    manager: Manager, config_for: ConfigFor, answer: Any, content: str, is_error: bool
) -> None:
    manager.answers["web.search"] = answer
    async with connect_tools(config_for(manager.url)) as box:
        result = await box.call("search", {})
    assert result.content.startswith(content)
    assert result.is_error == is_error
    assert len(manager.called) == 1


async def test_only_requests_that_were_not_taken_up_are_repeated(
    manager: Manager, config_for: ConfigFor
) -> None:
    manager.answers["web.search"] = [503, 429, {"content": "at last"}]
    manager.answers["web.echo"] = [502, {"content": "twice"}]
    async with connect_tools(config_for(manager.url)) as box:
        assert (await box.call("search", {})).content == "at last"
        with pytest.raises(
            ToolError, match=r"at http://.*/mcpapi lost the connection during a call: HTTP 502"
        ):
            await box.call("web.echo", {})
    assert len(manager.called) == 4
    manager.answers["web.search"] = 401
    async with connect_tools(config_for(manager.url)) as box:
        with pytest.raises(ToolError, match="refused the request: HTTP 401"):
            await box.call("search", {})


async def test_a_tool_that_takes_too_long_is_an_observation(
    manager: Manager, config_for: ConfigFor
) -> None:
    manager.answers["web.search"] = 2.0
    async with connect_tools(config_for(manager.url, call_timeout_seconds=0.2)) as box:
        result = await box.call("search", {})
    assert (result.content, result.is_error) == ("Error: no result within 0.2 s", True)


async def test_an_exchange_has_a_deadline_and_a_size(
    manager: Manager, config_for: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that comes in drops, or without an end, is given up."""
    monkeypatch.setattr(aggregator, "MAX_MESSAGE_BYTES", 2**20)
    async with connect_tools(config_for(manager.url, call_timeout_seconds=1.0)) as box:
        for answer, reason in (
            ("drops", "no result within 1 s"),
            ("flood", "the response is longer than 1 MiB"),
            ("gzip", "the response is compressed (gzip)"),
            ({"content": [1] * 300_000}, "the response contains more than 300000 commas"),
            ({"content": nested(300)}, "the response is not JSON: recursion limit"),
        ):
            manager.answers["web.echo"] = answer
            result = await box.call("web.echo", {"text": "x"})
            assert (result.is_error, reason in result.content) == (True, True), result.content


async def test_a_listing_that_is_too_long_or_badly_named_is_refused(
    manager: Manager, config_for: ConfigFor
) -> None:
    for names, reason in (
        ([f"web.t{number}" for number in range(2_001)], "lists more than 2000 tools"),
        (["web.a\nb"], r"lists a tool named 'a\\nb'"),
    ):
        manager.tools = [*map(function, names)]
        with pytest.raises(ToolError, match=reason):
            async with connect_tools(config_for(manager.url)):
                pass


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else "x"


async def test_servers_and_tools_behind_it_are_filtered(
    manager: Manager, config_for: ConfigFor
) -> None:
    async def names(**options: Any) -> list[str]:
        async with connect_tools(config_for(manager.url, **options)) as box:
            return [spec.name for spec in box.specs]

    assert await names(server_names=["web"]) == ["search", "echo"]
    assert await names(server_names=["default"], blocked_tools=["read_file"]) == [
        *("search", "web.echo", "files.v2.echo")
    ]
    assert await names(tool_names=["files.v2.echo"]) == ["files.v2.echo"]
    assert await names(server_names=["files.v2"], tool_names=["echo"]) == ["echo"]
    with pytest.raises(ConfigError, match="unknown MCP server 'wep'; did you mean 'web'"):
        await names(server_names=["wep"])


async def test_an_aggregator_stands_beside_other_servers(
    manager: Manager, config_for: ConfigFor, server_url: str
) -> None:
    servers = {"dock": {"url": manager.url}, "local": {"url": server_url}}
    async with connect_tools(config_for(servers, server_names=["local", "files.v2"])) as box:
        assert {spec.server for spec in box.specs} == {"local", "files.v2"}
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"
        assert (await box.call("echo", {"text": "x"})).content == "x"
    with pytest.raises(ConfigError, match="two MCP servers are named 'web'"):
        await probe(config_for({**servers, "web": {"url": server_url}}))


async def test_what_is_no_aggregator_is_named(manager: Manager, config_for: ConfigFor) -> None:
    with pytest.raises(ConfigError, match=r"at http://127\.0\.0\.1:9/mcpapi is unreachable"):
        await probe(config_for("http://user:pw@127.0.0.1:9/mcpapi"))
    with pytest.raises(ConfigError, match="returned HTTP 404 with invalid JSON for /servers"):
        await probe(config_for(manager.url.replace("/mcpapi", "/x/mcpapi")))
    manager.tools.append(function("other.search"))
    with pytest.raises(
        ConfigError, match=r"a tool that belongs to none of its servers: 'other\.search'"
    ):
        await probe(config_for(manager.url))
    manager.tools = json.loads('[{"type": "function"}]')
    with pytest.raises(ConfigError, match="a tool that belongs to none of its servers: None"):
        await probe(config_for(manager.url))

"""Client of AgentDock's `/mcpapi`: many tool servers behind a plain JSON API.

    GET  /mcpapi/servers             {"servers": [name, ...]}
    GET  /mcpapi/tools               {"tools": [{"type": "function", "function": {"name":
                                     "server.tool", "description", "parameters"}}]}
    POST /mcpapi/tool/{server.tool}  body: the arguments; returns {"content": ...}

A failed tool call returns status 200 and `{"status_code": 500, "detail": "..."}`, or an `error`
inside `content`. Both are the tool's own errors, which the model sees.
"""

import base64
import binascii
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent, Tool
from pydantic_core import from_json

from agentrl.errors import CallTimedOut, InvalidResult, ToolError, UnreadableReply
from agentrl.runtime.http.bounded_replies import density, num_marks, read_reply
from agentrl.runtime.http.http_clients import open_client
from agentrl.runtime.retries import retried
from agentrl.tools.servers.admission import (
    MAX_MESSAGE_BYTES,
    STATUS_LOST,
    STATUS_NOT_SENT,
    describe,
    listing_problem,
)
from agentrl.tools.servers.server_config import McpServer, ToolsConfig, http_headers

logger = logging.getLogger(__name__)

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_STATUS_REFUSED = (401, 403)


class _RequestFailed(Exception):
    """A request failed in a way that can be retried; steers the retry loops of this module."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class Aggregator:
    """An aggregator's servers and their tools; one pool of connections for all rollouts."""

    def __init__(self, name: str, server: McpServer, config: ToolsConfig) -> None:
        """Prepare; nothing is sent."""
        self.name = name
        self.server = server
        self._config = config
        self._timeout = server.call_timeout_seconds or config.call_timeout_seconds
        self._url = (server.url or "").rstrip("/")
        self._http = open_client(
            headers=http_headers(server, config),
            timeout=httpx.Timeout(config.connect_timeout_seconds),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=3.0),
        )

    async def list_tools(self) -> dict[str, list[Tool]]:
        """Return the tools of every server behind this address, by the server's name."""
        servers = (await self._get("/servers")).get("servers")
        tools = (await self._get("/tools")).get("tools")
        if not isinstance(servers, list) or not isinstance(tools, list):
            raise self._error("did not list its servers and tools")
        listed: dict[str, list[Tool]] = {str(name): [] for name in servers}
        for tool in tools:
            server, parsed = self._parse_tool(tool, listed)
            listed[server].append(parsed)
        for server_tools in listed.values():
            if (problem := listing_problem(server_tools)) is not None:
                raise self._error(problem)
        return listed

    async def call(self, server: str, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool; raises as `ServerConnection.call_tool` does."""
        path = f"/tool/{quote(f'{server}.{tool}', safe='')}"

        async def attempt() -> CallToolResult:
            try:
                return _to_result(await self._send("POST", path, dict(arguments)))
            except httpx.ReadTimeout as error:
                # Find out whether the tool or the whole server hangs: this raises if the server does.
                await self._get("/servers")
                raise CallTimedOut(f"no result within {self._timeout:g} s") from error
            except _RequestFailed as error:
                if error.sent and not self._config.retry_lost_calls:
                    raise self._error("lost the connection during a call", error) from error
                raise

        try:
            return await retried(attempt, on=_RequestFailed, pauses=self._config.retry_pauses)
        except _RequestFailed as error:
            raise self._error("failed on every attempt", error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        failures = (httpx.ReadTimeout, _RequestFailed)
        try:
            body = await retried(
                lambda: self._send("GET", path, None),
                on=failures,
                pauses=self._config.retry_pauses,
            )
        except failures as error:
            raise self._error("is unreachable", error) from error
        if not isinstance(body, dict):
            raise self._error(f"returned no JSON object for {path}")
        return body

    async def _send(self, method: str, path: str, body: object) -> object:
        timeout = httpx.Timeout(
            self._config.connect_timeout_seconds,
            read=self._timeout if method == "POST" else self._config.connect_timeout_seconds,
        )
        content = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} if content is not None else None
        try:
            status, reply = await read_reply(
                self._http,
                method,
                self._url + path,
                max_bytes=MAX_MESSAGE_BYTES,
                seconds=timeout.read,
                content=content,
                headers=headers,
                timeout=timeout,
            )
        except TimeoutError as error:
            raise httpx.ReadTimeout("the response was not complete in time") from error
        except httpx.ReadTimeout:
            raise
        except httpx.HTTPError as error:
            raise _RequestFailed(describe(error), sent=not isinstance(error, _NOT_SENT)) from error
        except UnreadableReply as error:
            raise self._unreadable(method, path, str(error)) from error
        return self._parsed(method, path, status, reply)

    def _parsed(self, method: str, path: str, status: int, reply: bytes) -> object:
        if status in _STATUS_REFUSED:
            raise self._error("refused the request", _RequestFailed(f"HTTP {status}", sent=False))
        if status in (*STATUS_NOT_SENT, *STATUS_LOST):
            raise _RequestFailed(f"HTTP {status}", sent=status in STATUS_LOST)
        if (reason := density(num_marks(reply))) is not None:
            raise self._unreadable(method, path, reason)
        try:
            body = from_json(reply)  # accepts NaN, which tools written in Python send
        except ValueError as error:
            if status >= 400 or method == "GET":
                problem = f"returned HTTP {status} with invalid JSON for {path}"
                raise self._error(problem) from error
            raise InvalidResult(f"the response is not JSON: {error}") from error
        if status >= 400 and method == "GET":
            raise self._error(f"returned HTTP {status} for {path}")
        if status >= 400:
            # The aggregator processed the call and rejected it: an unknown tool, bad arguments.
            return {"status_code": status, "detail": _detail(body)}
        return body

    def _unreadable(self, method: str, path: str, reason: str) -> ToolError | InvalidResult:
        """Return the error for an unreadable reply; for a call, the model sees it."""
        if method == "GET":
            return self._error(f"returned an unreadable response for {path}: {reason}")
        return InvalidResult(reason)

    def _parse_tool(self, tool: object, servers: Mapping[str, object]) -> tuple[str, Tool]:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        # Try the longest name first: server names may contain dots, too.
        for server in sorted(servers, key=len, reverse=True):
            if isinstance(name, str) and name.startswith(f"{server}."):
                assert isinstance(function, dict)
                schema = function.get("parameters") or {"type": "object", "properties": {}}
                return server, Tool(
                    name=name.removeprefix(f"{server}."),
                    description=function.get("description") or "",
                    input_schema=schema,
                )
        raise self._error(f"lists a tool that belongs to none of its servers: {name!r}")

    def _error(self, problem: str, error: BaseException | None = None) -> ToolError:
        if error is not None:
            problem += f": {error if isinstance(error, _RequestFailed) else describe(error)}"
        return ToolError(f"aggregator {self.name!r} at {self.server.address} {problem}")


class AggregatedServer:
    """One of the servers behind an aggregator, with the interface of a `ServerConnection`."""

    def __init__(self, aggregator: Aggregator, name: str) -> None:
        """Represent the server of that name."""
        self._aggregator = aggregator
        self._name = name
        self.server = aggregator.server

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, repeatable: bool
    ) -> CallToolResult:
        """Call a tool; the protocol does not declare which tools are repeatable."""
        return await self._aggregator.call(self._name, name, arguments)

    async def close(self) -> None:
        """Do nothing: other servers share the aggregator's connections."""


def _to_result(body: object) -> CallToolResult:
    if not isinstance(body, dict):
        raise InvalidResult("the answer is not an object")
    status = body.get("status_code")
    if isinstance(status, int) and status >= 400 and "detail" in body:
        return _error_result(_text(body["detail"]))
    if "content" not in body:
        raise InvalidResult("the answer has no content")
    content = body["content"]
    if isinstance(content, dict) and content.get("error"):
        return _error_result(_text(content["error"]))
    if content == {}:
        return _error_result("the tool returned nothing")
    if isinstance(content, list) and content and all(map(_is_part, content)):
        return CallToolResult(content=[_block(part) for part in content])
    return CallToolResult(content=[TextContent(type="text", text=_text(content))])


def _error_result(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def _is_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "image_url")


def _block(part: Mapping[str, Any]) -> ContentBlock:
    if part["type"] == "text":
        return TextContent(type="text", text=_text(part.get("text")))
    image = part.get("image_url")
    url = str(image.get("url", "") if isinstance(image, dict) else image)
    head, found, data = url.partition(";base64,")
    if not (found and head.startswith("data:") and _is_base64(data)):
        return TextContent(type="text", text=f"[image {url[:200]}, not shown]")
    return ImageContent(type="image", data=data, mime_type=head.removeprefix("data:"))


def _is_base64(data: str) -> bool:
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _detail(body: object) -> object:
    return body["detail"] if isinstance(body, dict) and "detail" in body else body


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

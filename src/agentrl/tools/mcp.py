"""The tools of a run's MCP servers as one box. The only door to MCP."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from difflib import get_close_matches
from typing import Any

from mcp import MCPError
from mcp.types import PARSE_ERROR, Tool

from agentrl.errors import ConfigError, ToolError
from agentrl.schema import ToolResult
from agentrl.tools.base import ToolSpec
from agentrl.tools.config import ToolsConfig
from agentrl.tools.connection import CallTimedOut, InvalidResult, ServerConnection
from agentrl.tools.content import cut_middle, result_text

logger = logging.getLogger(__name__)


class McpToolBox:
    """Tools of one or more MCP servers; one connection a server, shared by all rollouts."""

    def __init__(
        self,
        config: ToolsConfig,
        specs: Sequence[ToolSpec],
        connections: Mapping[str, ServerConnection],
    ) -> None:
        """Offer `specs`, called over `connections`; `connect_tools` is the way to a box."""
        self._config = config
        self._specs = tuple(specs)
        self._by_name = {spec.name: spec for spec in specs}
        self._connections = dict(connections)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools on offer, ordered by server and then as the server lists them."""
        return self._specs

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, call_id: str = ""
    ) -> ToolResult:
        """Call a tool.

        What the model can do something about comes back as a result with `is_error`: an unknown
        name, arguments that the server refuses, a tool's own error, a tool that takes too long.

        Raises:
            ToolError: the server is unreachable, or was lost where repeating might do harm.
        """
        started = time.monotonic()
        spec = self._by_name.get(name)
        if spec is None:
            text, is_error = self._unknown(name), True
        else:
            text, is_error = await self._call(spec, arguments)
        return ToolResult(
            call_id=call_id,
            name=name,
            content=text,
            is_error=is_error,
            seconds=time.monotonic() - started,
        )

    @asynccontextmanager
    async def for_rollout(self) -> AsyncIterator["McpToolBox"]:
        """Yield the box that one rollout is to use.

        Servers that keep state in the session (`per_rollout`) get a connection of its own, which
        is opened at its first call and closed at the end; the others stay shared.
        """
        own = {
            name: ServerConnection(name, connection.server, self._config)
            for name, connection in self._connections.items()
            if connection.server.per_rollout
        }
        if not own:
            yield self
            return
        try:
            yield McpToolBox(self._config, self._specs, {**self._connections, **own})
        finally:
            for connection in own.values():
                await connection.close()

    async def _call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        limit = self._config.max_result_chars
        try:
            result = await self._connections[spec.server].call_tool(
                spec.remote_name, arguments, repeatable=spec.repeatable
            )
        except MCPError as error:
            if error.code == PARSE_ERROR:
                # What came back was no MCP: nothing that a model did or could mend.
                raise ToolError(
                    f"MCP server {spec.server!r} answered with garbage: {error.message}"
                ) from error
            return cut_middle(f"Error: {error.message}", limit), True
        except CallTimedOut as error:
            return f"Error: {error}", True
        except InvalidResult as error:
            return cut_middle(f"Error: the tool's result is invalid: {error}", limit), True
        return result_text(result, limit), bool(result.is_error)

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._by_name, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"Error: there is no tool named {name!r}.{hint} Tools: {', '.join(self._by_name)}"


@asynccontextmanager
async def connect_tools(config: ToolsConfig) -> AsyncIterator[McpToolBox]:
    """Connect to all selected servers and offer their tools.

    Raises:
        ToolError: a server cannot be reached.
        ConfigError: a tool named in the configuration does not exist.
    """
    connections = {
        name: ServerConnection(name, server, config) for name, server in config.selected.items()
    }
    async with AsyncExitStack() as stack:
        for connection in connections.values():
            stack.push_async_callback(connection.close)
        answers = await asyncio.gather(
            *(connection.list_tools() for connection in connections.values()),
            return_exceptions=True,  # so that every connection has settled before it is closed
        )
        listed: dict[str, list[Tool]] = {}
        for name, answer in zip(connections, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            listed[name] = answer
        specs = _select(listed, config.tool_names)
        yield McpToolBox(config, specs, connections)


async def probe(config: ToolsConfig) -> tuple[ToolSpec, ...]:
    """Connect once, list the tools and disconnect; for checks before anything starts.

    Raises:
        ConfigError: a server cannot be reached (its address is named), or there is no tool.
    """
    try:
        async with connect_tools(config.model_copy(update={"max_retries": 0})) as box:
            specs = box.specs
    except ToolError as error:
        raise ConfigError(str(error)) from error
    if not specs:
        raise ConfigError("the MCP servers offer no tools")
    return specs


def _select(
    listed: Mapping[str, Sequence[Tool]], tool_names: Sequence[str] | None
) -> list[ToolSpec]:
    """Name the tools so that every name is unique, and keep those that were asked for."""
    uses = Counter(tool.name for tools in listed.values() for tool in tools)
    clashing = sorted(name for name, count in uses.items() if count > 1)
    if clashing:
        logger.warning(
            "several MCP servers offer the same tools, shown as server.tool: %s",
            ", ".join(clashing),
        )
    specs = [
        _spec(server, tool, qualified=uses[tool.name] > 1)
        for server, tools in listed.items()
        for tool in tools
    ]
    if tool_names is None:
        return specs
    known = {spec.remote_name for spec in specs} | {f"{s.server}.{s.remote_name}" for s in specs}
    for name in tool_names:
        if name not in known:
            offered = ", ".join(spec.name for spec in specs)
            raise ConfigError(f"no MCP server offers a tool {name!r} (offered: {offered})")
    wanted = set(tool_names)
    return [
        spec
        for spec in specs
        if spec.remote_name in wanted or f"{spec.server}.{spec.remote_name}" in wanted
    ]


def _spec(server: str, tool: Tool, *, qualified: bool) -> ToolSpec:
    hints = tool.annotations
    return ToolSpec(
        name=f"{server}.{tool.name}" if qualified else tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
        server=server,
        remote_name=tool.name,
        repeatable=hints is not None and bool(hints.read_only_hint or hints.idempotent_hint),
    )

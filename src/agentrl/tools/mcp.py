"""The tools of a run's MCP servers as one box. The only door to MCP."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mcp import MCPError
from mcp.types import PARSE_ERROR, Tool

from agentrl.errors import ConfigError, ToolError
from agentrl.schema import ToolResult
from agentrl.tools.aggregator import AggregatedServer, Aggregator
from agentrl.tools.base import ToolSpec
from agentrl.tools.config import ToolsConfig
from agentrl.tools.connection import ServerConnection, is_repeatable
from agentrl.tools.content import cut_middle, result_images, result_text
from agentrl.tools.faults import CallTimedOut, InvalidResult

logger = logging.getLogger(__name__)

Connection = ServerConnection | AggregatedServer


@dataclass(frozen=True)
class _Said:
    """What came of a call."""

    text: str
    is_error: bool
    images: tuple[str, ...] = ()


class McpToolBox:
    """Tools of one or more MCP servers; one connection a server, shared by all rollouts."""

    def __init__(
        self,
        config: ToolsConfig,
        specs: Sequence[ToolSpec],
        connections: Mapping[str, Connection],
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
            said = _Said(self._unknown(name), is_error=True)
        else:
            said = await self._call(spec, arguments)
        return ToolResult(
            call_id=call_id,
            name=name,
            content=said.text,
            is_error=said.is_error,
            seconds=time.monotonic() - started,
            images=said.images,
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

    async def _call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> _Said:
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
            return _Said(cut_middle(f"Error: {error.message}", limit), is_error=True)
        except CallTimedOut as error:
            return _Said(f"Error: {error}", is_error=True)
        except InvalidResult as error:
            text = f"Error: the tool's result is invalid: {error}"
            return _Said(cut_middle(text, limit), is_error=True)
        show_images = self._config.show_images
        return _Said(
            result_text(result, limit, show_images=show_images),
            is_error=bool(result.is_error),
            images=result_images(result) if show_images else (),
        )

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
    servers: dict[str, ServerConnection | Aggregator] = {
        name: (Aggregator if server.transport == "aggregator" else ServerConnection)(
            name, server, config
        )
        for name, server in config.selected.items()
    }
    async with AsyncExitStack() as stack:
        for server in servers.values():
            stack.push_async_callback(server.close)
        answers = await asyncio.gather(
            *(_offer(name, server) for name, server in servers.items()),
            return_exceptions=True,  # so that every connection has settled before it is closed
        )
        listed: dict[str, list[Tool]] = {}
        connections: dict[str, Connection] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            for name, (tools, connection) in answer.items():
                if name in listed:
                    raise ConfigError(
                        f"two MCP servers are called {name!r}; rename one in mcpServers"
                    )
                listed[name], connections[name] = tools, connection
        if config.server_names is not None:
            config.check_server_names({*listed, *config.servers})
            listed = {
                name: tools
                for name, tools in listed.items()
                if name in config.server_names or _behind(connections[name]) in config.server_names
            }
        yield McpToolBox(config, _select(listed, config), connections)


async def _offer(
    name: str, server: ServerConnection | Aggregator
) -> dict[str, tuple[list[Tool], Connection]]:
    """Return the tools and the connection of a server, or of each one behind an aggregator."""
    if isinstance(server, ServerConnection):
        return {name: (await server.list_tools(), server)}
    return {
        inner: (tools, AggregatedServer(server, inner))
        for inner, tools in (await server.list_tools()).items()
    }


def _behind(connection: Connection) -> str | None:
    """Return the name of the aggregator that a server is behind, if it is."""
    return connection.aggregator_name if isinstance(connection, AggregatedServer) else None


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


def _select(listed: Mapping[str, Sequence[Tool]], config: ToolsConfig) -> list[ToolSpec]:
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
    known = {spec.remote_name for spec in specs} | {_qualified(spec) for spec in specs}
    for name in (*(config.tool_names or ()), *config.blocked_tools):
        if name not in known:
            offered = ", ".join(spec.name for spec in specs)
            raise ConfigError(f"no MCP server offers a tool {name!r} (offered: {offered})")
    wanted = known if config.tool_names is None else set(config.tool_names)
    blocked = set(config.blocked_tools)
    return [
        spec
        for spec in specs
        if not wanted.isdisjoint(names := (spec.remote_name, _qualified(spec)))
        and blocked.isdisjoint(names)
    ]


def _qualified(spec: ToolSpec) -> str:
    return f"{spec.server}.{spec.remote_name}"


def _spec(server: str, tool: Tool, *, qualified: bool) -> ToolSpec:
    return ToolSpec(
        name=f"{server}.{tool.name}" if qualified else tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
        server=server,
        remote_name=tool.name,
        repeatable=is_repeatable(tool),
    )

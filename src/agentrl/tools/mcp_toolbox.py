"""The tools of a run's MCP servers as one tool box.

Input: a `ToolsConfig`. Output: tool results for the model, and `ToolError` if the infrastructure
failed. A tool's own errors are results.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mcp import MCPError
from mcp.types import Tool

from agentrl.errors import CallTimedOut, ConfigError, InvalidResult, ScorerDefect, ToolError
from agentrl.runtime.folder_snapshots import MAX_SNAPSHOT_BYTES, pack_folders, unpack_folders
from agentrl.schema import ToolResult
from agentrl.tools.aggregator import AggregatedServer, Aggregator
from agentrl.tools.servers.admission import MAX_TOOLS
from agentrl.tools.servers.client_session import scratch_folder
from agentrl.tools.servers.connection import ServerConnection
from agentrl.tools.servers.result_content import cut_middle, result_images, result_text
from agentrl.tools.servers.served_question import NO_QUESTION, ServedQuestion
from agentrl.tools.servers.server_config import ToolsConfig
from agentrl.tools.tool_specs import ToolSpec, check_filters, hidden_tools, select_tools

logger = logging.getLogger(__name__)

MAX_INSTRUCTIONS_CHARS = 4_000
"""Of one server's instructions; longer ones are cut in the middle."""

Connection = ServerConnection | AggregatedServer


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a call, as shown to the model."""

    text: str
    is_error: bool
    images: tuple[str, ...] = ()


class McpToolBox:
    """Tools of one or more MCP servers; all rollouts share one connection to each server."""

    def __init__(
        self,
        config: ToolsConfig,
        specs: Sequence[ToolSpec],
        connections: Mapping[str, Connection],
        hidden: Sequence[ToolSpec] = (),
    ) -> None:
        """Offer `specs`, called over `connections`. `connect_tools` builds a box from a config."""
        self._config = config
        self.offer(specs, connections, hidden)
        self._num_changes: dict[str, int] | None = None
        """In a rollout's box: how many changes of each server's tools the model knows of."""
        self._folders: dict[str, Path] = {}
        """In a rollout's box: the folders of the servers that were started for it."""
        self._folder_names: list[str] = []
        """Their servers, in the order of the folders' numbers."""
        self._has_all_state = False
        """In a rollout's box: whether its servers keep their state nowhere else."""

    def offer(
        self,
        specs: Sequence[ToolSpec],
        connections: Mapping[str, Connection],
        hidden: Sequence[ToolSpec] = (),
    ) -> None:
        """Offer these tools to new rollouts; running rollouts keep the previous ones.

        The hidden ones are for scorers alone.
        """
        self._specs = tuple(specs)
        self._hidden = {spec.name: spec for spec in hidden}
        self._by_name = {spec.name: spec for spec in specs}
        self._connections = dict(connections)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The offered tools, by server, in the server's order."""
        return self._specs

    @property
    def instructions(self) -> str:
        """Usage instructions of the tools' servers; empty if there are none."""
        if not self._config.show_instructions:
            return ""
        used = dict.fromkeys(spec.server for spec in self._specs)
        texts = {name: getattr(self._connections[name], "instructions", "") for name in used}
        return "\n\n".join(
            f"Instructions of the tool server {name}:\n{cut_middle(text, MAX_INSTRUCTIONS_CHARS)}"
            for name, text in texts.items()
            if text
        )

    @property
    def protocol_versions(self) -> dict[str, str]:
        """The version of MCP that each server speaks, by its name."""
        return {
            name: connection.protocol_version
            for name, connection in self._connections.items()
            if isinstance(connection, ServerConnection)
        }

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, call_id: str = ""
    ) -> ToolResult:
        """Call a tool.

        Errors that the model can react to are results with `is_error`: an unknown name, refused
        arguments, a tool's own error, a timeout.

        Raises:
            ToolError: the server is unreachable, or was lost and a retry is not safe.
        """
        started = time.monotonic()
        spec = self._by_name.get(name)
        if spec is None:
            outcome = _Outcome(self._unknown_tool_text(name), is_error=True)
        else:
            outcome = await self._call(spec, arguments)
        added = "" if spec is None else await self._tools_added(spec.server)
        return ToolResult(
            call_id=call_id,
            name=name,
            content=outcome.text + added,
            is_error=outcome.is_error,
            seconds=time.monotonic() - started,
            images=outcome.images,
        )

    @asynccontextmanager
    async def for_rollout(
        self, question: ServedQuestion = NO_QUESTION, *, restored: bytes | None = None
    ) -> AsyncIterator["McpToolBox"]:
        """Yield the box for one rollout; its tools stay the ones that are on offer now.

        Servers that keep state in the session (`per_rollout`) get a connection for this rollout,
        opened at its first call and closed at the end; the others stay shared.

        Args:
            question: what these servers are told of the rollout's question.
            restored: state of `snapshot` in which the servers start, in place of the fixture.

        Raises:
            ConfigError: the question lacks a column that a server's settings name.
            ToolError: a fixture cannot be copied.
        """
        async with AsyncExitStack() as stack:
            private: dict[str, Connection] = {}
            folders: dict[str, Path] = {}
            for name, connection in self._connections.items():
                if not (isinstance(connection, ServerConnection) and connection.server.per_rollout):
                    continue
                if connection.server.command is not None:
                    folders[name] = await stack.enter_async_context(scratch_folder())
                    await connection.server.prepare(question, folders[name])
                private[name] = own = connection.for_rollout(question, folders.get(name))
                stack.push_async_callback(own.close)
            connections = {**self._connections, **private}
            box = McpToolBox(self._config, self._specs, connections, [*self._hidden.values()])
            box._num_changes = {
                name: connection.num_changes
                for name, connection in box._connections.items()
                if isinstance(connection, ServerConnection)
            }
            box._folder_names = sorted(folders)
            box._folders = {f"{n}": folders[name] for n, name in enumerate(box._folder_names)}
            box._has_all_state = all(one.server.state == "folder" for one in private.values())
            if restored is not None:
                await asyncio.to_thread(unpack_folders, restored, box._folders)
            yield box

    def snapshot(self) -> bytes | None:
        """Return the state of a rollout's servers.

        Returns:
            None if a server has state outside its folder, or too much of it.
        """
        return pack_folders(self._folders) if self._folders and self._has_all_state else None

    async def copy_folders(self, target: Path) -> Path:
        """Copy the directories of the servers that were started for a rollout, without links.

        Args:
            target: an empty folder; several servers have a subfolder each.

        Raises:
            ScoringError: no server has a directory, or they are too large.
        """
        packed = await asyncio.to_thread(pack_folders, self._folders) if self._folders else None
        if packed is None:
            problem = "is too large, or changes" if self._folders else "does not exist"
            raise ScorerDefect(
                f"the folder of the rollout {problem}: only `per_rollout` commands have one, of up to "
                f"{MAX_SNAPSHOT_BYTES >> 20} MiB",
                kind=f"the folder of the rollout {problem}",
                is_certain=True,
            )
        single = len(self._folders) == 1
        copies = {
            number: target if single else target / quote(name, safe="")
            for number, name in zip(self._folders, self._folder_names, strict=True)
        }
        for folder in copies.values():
            folder.mkdir(exist_ok=True)
        await asyncio.to_thread(_unpack_without_links, packed, copies)
        return target

    async def _tools_added(self, server: str) -> str:
        """Offer tools that a server added during the rollout; return a note about them.

        The prompt, which lists the tools, was already sampled from; therefore the result of the
        current call describes the new ones.
        """
        connection = self._connections[server]
        if self._num_changes is None or not isinstance(connection, ServerConnection):
            return ""
        if self._num_changes.get(server, 0) == connection.num_changes:
            return ""
        self._num_changes[server] = connection.num_changes
        try:
            tools = await connection.list_tools_again()
        except ToolError as error:
            logger.warning("tools added by the server are not available: %s", error)
            return ""
        known = {spec.remote_name for spec in self._specs if spec.server == server}
        new = [
            spec
            for spec in select_tools({server: tools}, self._config)
            if spec.remote_name not in known and spec.name not in self._by_name
        ]
        if len(self._specs) + len(new) > MAX_TOOLS:
            logger.warning(
                "MCP server %r keeps adding tools: a rollout is limited to the %d that it has",
                server,
                len(self._specs),
            )
            return ""
        if not new:
            return ""
        self.offer([*self._specs, *new], self._connections, [*self._hidden.values()])
        schemas = json.dumps([spec.openai() for spec in new], ensure_ascii=False)
        limit = self._config.max_result_chars
        return f"\n\nNew tools can be called from now on:\n{cut_middle(schemas, limit)}"

    async def call_for_scorer(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool, also one that is hidden from the policy.

        Raises:
            ScorerDefect: there is no such tool.
            ToolError: see `call`.
        """
        spec = self._hidden.get(name)
        if spec is not None:
            outcome = await self._call(spec, arguments)
            return ToolResult(
                call_id="scorer", name=name, content=outcome.text, is_error=outcome.is_error
            )
        if name not in self._by_name:
            known = ", ".join((*self._by_name, *self._hidden)) or "none"
            text = f"the scorer calls {name!r}, which no tool server offers (available: {known})"
            raise ScorerDefect(text, kind=text, is_certain=True)
        return await self.call(name, arguments, call_id="scorer")

    async def _call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> _Outcome:
        limit = self._config.max_result_chars
        try:
            # Arguments that cannot be sent would end the connection.
            json.dumps(dict(arguments), ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return _Outcome(f"Error: the arguments are not JSON: {error}", is_error=True)
        try:
            result = await self._connections[spec.server].call_tool(
                spec.remote_name, arguments, repeatable=spec.repeatable
            )
        except MCPError as error:
            return _Outcome(cut_middle(f"Error: {error.message}", limit), is_error=True)
        except CallTimedOut as error:
            return _Outcome(f"Error: {error}", is_error=True)
        except InvalidResult as error:
            text = f"Error: the tool's result is invalid: {error}"
            return _Outcome(cut_middle(text, limit), is_error=True)
        show_images = self._config.show_images
        return _Outcome(
            result_text(result, limit, show_images=show_images),
            is_error=bool(result.is_error),
            images=result_images(result) if show_images else (),
        )

    def _unknown_tool_text(self, name: str) -> str:
        near = get_close_matches(name, self._by_name, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        text = f"Error: there is no tool named {name!r}.{hint} Tools: {', '.join(self._by_name)}"
        return cut_middle(text, self._config.max_result_chars)


def _unpack_without_links(packed: bytes, folders: Mapping[str, Path]) -> None:
    """Unpack for a reader outside of the wall, whom a link could lead anywhere."""
    unpack_folders(packed, folders)
    for folder in folders.values():
        for place, inner, files in os.walk(folder):
            for path in (Path(place) / name for name in (*inner, *files)):
                if path.is_symlink():
                    path.unlink()


Server = ServerConnection | Aggregator
Offer = Mapping[str, tuple[Sequence[Tool], Connection]]
"""Tools of a configured server by name, or those of each server behind an aggregator."""


@asynccontextmanager
async def connect_tools(config: ToolsConfig) -> AsyncIterator[McpToolBox]:
    """Connect to all selected servers and offer their tools; refresh the lists periodically.

    Raises:
        ToolError: a server cannot be reached.
        ConfigError: a tool named in the configuration does not exist.
    """
    servers: dict[str, Server] = {
        name: (Aggregator if server.transport == "aggregator" else ServerConnection)(
            name, server, config
        )
        for name, server in config.selected.items()
    }
    async with AsyncExitStack() as stack:
        for server in servers.values():
            stack.push_async_callback(server.close)
        results = await asyncio.gather(
            *(_offer(name, server) for name, server in servers.items()),
            return_exceptions=True,  # let every connection settle before any is closed
        )
        offers: dict[str, Offer] = {}
        for name, result in zip(servers, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            offers[name] = result
        listed, connections = _merged(offers, config)
        check_filters(listed, config)
        box = McpToolBox(
            config, select_tools(listed, config), connections, hidden_tools(listed, config)
        )
        refresher = asyncio.create_task(_refresh(box, servers, offers, config))
        try:
            yield box
        finally:
            refresher.cancel()
            with suppress(asyncio.CancelledError):
                await refresher


async def _refresh(
    box: McpToolBox, servers: Mapping[str, Server], offers: dict[str, Offer], config: ToolsConfig
) -> None:
    """Update the box periodically; a server that does not respond keeps its former tools."""
    while True:
        await asyncio.sleep(config.refresh_seconds)
        for name, server in servers.items():
            try:
                offers[name] = await _offer(name, server, is_refresh=True)
            except ToolError as error:
                logger.warning("keeping the previous tools: %s", error)
        try:
            listed, connections = _merged(offers, config)
        except ConfigError as error:
            logger.warning("keeping the previous tools: %s", error)
            continue
        specs = tuple(select_tools(listed, config))
        if specs != box.specs:
            logger.warning("the tools have changed: %s", [spec.name for spec in specs])
        box.offer(specs, connections, hidden_tools(listed, config))


async def _offer(name: str, server: Server, *, is_refresh: bool = False) -> Offer:
    if isinstance(server, ServerConnection):
        tools = await (server.list_tools_again() if is_refresh else server.list_tools())
        return {name: (tools, server)}
    return {
        inner: (tools, AggregatedServer(server, inner))
        for inner, tools in (await server.list_tools()).items()
    }


def _merged(
    offers: Mapping[str, Offer], config: ToolsConfig
) -> tuple[dict[str, Sequence[Tool]], dict[str, Connection]]:
    """Return tools and connections of all servers in use, by name."""
    listed: dict[str, Sequence[Tool]] = {}
    connections: dict[str, Connection] = {}
    for configured_name, offer in offers.items():
        for name, (tools, connection) in offer.items():
            if name in connections:
                raise ConfigError(f"two MCP servers are named {name!r}; rename one in mcpServers")
            connections[name] = connection
            if config.server_names is None or not {name, configured_name}.isdisjoint(
                config.server_names
            ):
                listed[name] = tools
    if config.server_names is not None:
        config.check_server_names({*connections, *config.servers})
    return listed, connections


async def probe(config: ToolsConfig) -> tuple[ToolSpec, ...]:
    """Connect once, list the tools and disconnect: the check before any process starts.

    Raises:
        ConfigError: a server is unreachable (the message names its address), or offers no tool.
    """
    try:
        async with connect_tools(config.model_copy(update={"max_retries": 0})) as box:
            specs = box.specs
    except ToolError as error:
        raise ConfigError(str(error)) from error
    if not specs:
        raise ConfigError("the MCP servers offer no tools")
    return specs

"""Tools of a rollout: schemas, a tool box to call them, and their displayed names."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mcp.types import Tool

from agentrl.errors import ConfigError
from agentrl.schema import ToolResult
from agentrl.tools.servers.server_config import ToolsConfig


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model sees it."""

    name: str
    """Unique in its tool box; `server.tool` if several servers offer the same name."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    server: str
    remote_name: str
    """The server's own name for the tool."""
    repeatable: bool = False
    """The server declares the tool read-only or idempotent."""

    def openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, as chat templates expect it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


class ToolBox(Protocol):
    """Tools that a rollout may call."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools on offer, in a fixed order."""
        ...

    @property
    def instructions(self) -> str:
        """Usage instructions of the tools' servers; empty if there are none."""
        ...

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, call_id: str = ""
    ) -> ToolResult:
        """Call a tool, within a time bound.

        Errors that the model can react to (an unknown name, invalid arguments, the tool's own
        error, a timeout) are results with `is_error`.

        Raises:
            ToolError: the infrastructure behind the tool failed.
        """
        ...


logger = logging.getLogger(__name__)

Listed = Mapping[str, Sequence[Tool]]
"""The tools that each server lists, by the server's name."""

_FIRST_KEYS = ("type", "properties", "required")
_NAMED_PARTS = frozenset({"properties", "$defs", "definitions"})
_PARTS = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"})
"""Keywords of a JSON schema that contain schemas: with names of their own, and without."""
_MAX_DEPTH = 20
"""Schemas further inside are shown as they are."""

# Characters that some tool-call formats cannot write in a name.
_UNWRITABLE = re.compile(r"[^\w.-]")


def select_tools(listed: Listed, config: ToolsConfig) -> list[ToolSpec]:
    """Give every tool a unique name, and return those that the configuration selects."""
    return [spec for spec in _named(listed) if _is_selected(spec, config)]


def hidden_tools(listed: Listed, config: ToolsConfig) -> list[ToolSpec]:
    """Return the tools that the configuration keeps from the policy, for scorers."""
    return [spec for spec in _named(listed) if not _is_selected(spec, config)]


def _is_selected(spec: ToolSpec, config: ToolsConfig) -> bool:
    wanted, names = config.tool_names, _names_of(spec)
    is_wanted = wanted is None or not names.isdisjoint(wanted)
    return is_wanted and names.isdisjoint(config.blocked_tools)


def check_filters(listed: Listed, config: ToolsConfig) -> None:
    """Check the configured names against what servers list, and log names that clash."""
    specs = _named(listed)
    clashing = sorted({spec.remote_name for spec in specs if spec.name != spec.remote_name})
    if clashing:
        logger.warning(
            "several MCP servers offer tools of the same name, renamed to server.tool: %s",
            ", ".join(clashing),
        )
    known = {name for spec in specs for name in _names_of(spec)}
    for name in (*(config.tool_names or ()), *config.blocked_tools):
        if name not in known:
            offered = ", ".join(spec.name for spec in specs)
            raise ConfigError(f"no MCP server offers the tool {name!r} (available: {offered})")


def unique_names(tools: Sequence[tuple[str, str]]) -> list[str]:
    """Return a unique name for each (server, tool).

    It is the tool's own name, or `server.tool` if that is not unique.
    """
    names = [tool for _, tool in tools]
    while True:
        uses = Counter(names)
        plain = [
            index
            for index, (_, tool) in enumerate(tools)
            if uses[names[index]] > 1 and names[index] == tool
        ]
        if not plain:
            break
        for index in plain:
            server, tool = tools[index]
            names[index] = f"{_UNWRITABLE.sub('_', server)}.{tool}"
    taken: set[str] = set()
    for index, name in enumerate(names):
        number = 2
        while names[index] in taken:
            names[index] = f"{name}_{number}"
            number += 1
        taken.add(names[index])
    return names


def is_repeatable(tool: Tool) -> bool:
    """Return whether a tool declares itself read-only or idempotent, so that calls may be repeated."""
    hints = tool.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


def _named(listed: Listed) -> list[ToolSpec]:
    # If a server lists a name twice, the last entry counts.
    tools = [
        (server, tool)
        for server, offered in listed.items()
        for tool in {tool.name: tool for tool in offered}.values()
    ]
    names = unique_names([(server, tool.name) for server, tool in tools])
    return [_spec(name, server, tool) for name, (server, tool) in zip(names, tools, strict=True)]


def _spec(name: str, server: str, tool: Tool) -> ToolSpec:
    schema = _without_echoes(tool.input_schema, tool.name)
    return ToolSpec(
        name=name,
        description=tool.description or "",
        # Chat templates read `properties` even of tools without arguments.
        parameters=_in_canonical_order({**schema, "properties": schema.get("properties") or {}}),
        server=server,
        remote_name=tool.name,
        repeatable=is_repeatable(tool),
    )


def _without_echoes(schema: Mapping[str, Any], name: str, depth: int = 0) -> dict[str, Any]:
    """Return a schema without the titles that repeat a name.

    Servers in Python add `"title": "Issue Id"` to a parameter `issue_id` by themselves: a fifth of a
    prompt's tokens, which say nothing.
    """
    if depth > _MAX_DEPTH:
        return dict(schema)
    echoes = {_letters(name), f"{_letters(name)}arguments"}

    def part(value: Any, part_name: str) -> Any:
        if isinstance(value, list):
            return [part(one, part_name) for one in value]
        is_schema = isinstance(value, Mapping)
        return _without_echoes(value, part_name, depth + 1) if is_schema else value

    kept = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str) and _letters(value) in echoes:
            continue
        if key in _NAMED_PARTS and isinstance(value, Mapping):
            kept[key] = {own: part(one, own) for own, one in value.items()}
        else:
            kept[key] = part(value, name) if key in _PARTS else value
    return kept


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _in_canonical_order(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its keys in the canonical order shown to models.

    The SDK's older and newer protocols use different orders, and a connection may switch at any
    time, but a resumed rollout must have the same prompt as before.
    """
    first = {key: schema[key] for key in _FIRST_KEYS if key in schema}
    return first | {key: schema[key] for key in sorted(schema.keys() - first.keys())}


def _names_of(spec: ToolSpec) -> set[str]:
    """Return the names that a configuration may use for a tool."""
    return {spec.name, spec.remote_name, f"{spec.server}.{spec.remote_name}"}

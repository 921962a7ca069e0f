"""Reads the `mcpServers` mapping, as it and other MCP clients write it."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.tools.server_config import McpServer, Transport

_TRANSPORT_NAMES: dict[str, Transport] = {
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
    "stdio": "stdio",
    "mcpapi": "aggregator",
}
_VARIABLE = re.compile(r"\$\{(?:env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_OTHER_VARIABLE = re.compile(r"\$\{(?:input|workspaceFolder|userHome|command)\b[^}]*\}")
# What other clients write about a server that is of no meaning here: who is asked before a call,
# and how it is shown to people.
_NOT_OURS = ("autoApprove", "alwaysAllow", "trust", "description", "icon", "sse_read_timeout")
_URL_KEYS = ("serverUrl", "httpUrl")


def load_mcp_servers(source: str | Path | Mapping[str, object]) -> dict[str, McpServer]:
    """Read an `mcpServers` mapping: `{"mcpServers": {NAME: {"url": ...} | {"command": ...}}}`.

    Args:
        source: a mapping, JSON text, the path of a JSON file, or the address of a single HTTP
            server (it is then called `default`; a path that ends with `/mcpapi` makes it an
            AgentDock aggregator). The outer `mcpServers` key may be left out, or be `servers`.
            `${NAME}`, `${env:NAME}` and `${NAME:-default}` in its texts stand for environment
            variables. Servers that are `disabled` are left out.

    Raises:
        ConfigError: the source is missing or malformed; the server at fault is named.
    """
    if isinstance(source, Mapping):
        data: object = source
    elif isinstance(source, str) and re.match(r"https?://", source):
        data = {"default": {"url": source}}
    else:
        data = _read_json(source)
    if isinstance(data, Mapping):
        key = next((key for key in ("mcpServers", "servers") if key in data), None)
        data = data if key is None else data[key]
    if not isinstance(data, Mapping) or not data:
        raise ConfigError("mcpServers: expected a non-empty object of servers by name")
    enabled = {
        str(name): value
        for name, value in data.items()
        if not (isinstance(value, Mapping) and value.get("disabled") is True)
    }
    if not enabled:
        raise ConfigError("mcpServers: every server in it is disabled")
    return {name: _parse_server(name, value) for name, value in enabled.items()}


def _read_json(source: str | Path) -> object:
    text, origin = str(source), "mcpServers"
    if not text.lstrip().startswith("{"):
        origin = text
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"MCP servers file {origin}: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: not JSON ({error})") from error


def _filled_in(name: str, value: object) -> object:
    """Replace `${NAME}` and `${NAME:-default}` in all texts by environment variables."""
    if isinstance(value, str):
        if other := _OTHER_VARIABLE.search(value):
            raise ConfigError(
                f"mcpServers.{name}: {other[0]} is known to another client only; "
                "write the value, or an environment variable as ${NAME}"
            )
        return _VARIABLE.sub(lambda match: _variable(name, match), value)
    if isinstance(value, Mapping):
        return {key: _filled_in(name, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled_in(name, part) for part in value]
    return value


def _variable(name: str, match: re.Match[str]) -> str:
    value = os.environ.get(match["name"], match["default"])
    if value is None:
        raise ConfigError(
            f"mcpServers.{name}: the environment variable {match['name']} is not set; "
            "set it, or give a default as in ${NAME:-default}"
        )
    return value


def _kind(fields: Mapping[str, object]) -> str:
    if "command" in fields:
        return "stdio"
    path = str(fields.get("url", "")).split("?", 1)[0].rstrip("/")
    return "mcpapi" if path.endswith("/mcpapi") else "http"


def _parse_server(name: str, value: object) -> McpServer:
    if not isinstance(value, Mapping):
        raise ConfigError(f"mcpServers.{name}: expected an object")
    value = {"url" if key in _URL_KEYS else key: part for key, part in value.items()}
    fields = {
        key: _filled_in(name, part)
        for key, part in value.items()
        if key not in (*_NOT_OURS, "disabled")
    }
    fields["written"] = _written(value)
    kind = fields.pop("type", None) or fields.pop("transport", None)
    if kind is None:
        kind = _kind(fields)
    if kind not in _TRANSPORT_NAMES:
        known = ", ".join(sorted(set(_TRANSPORT_NAMES)))
        raise ConfigError(f"mcpServers.{name}: unknown transport {kind!r} (known: {known})")
    # Other clients have separate limits for requests and streams; the longest call is the last one.
    for limit in ("timeout", "client_session_timeout_seconds"):
        if limit in fields:
            fields["call_timeout_seconds"] = fields.pop(limit)
    try:
        return McpServer.model_validate({**fields, "transport": _TRANSPORT_NAMES[kind]})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(["mcpServers", name, *map(str, first["loc"])])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(key for key in McpServer.model_fields if key != "written")
            reason = f"unknown setting (known: {known})"
        raise ConfigError(f"{where}: {reason}") from error


def _written(value: Mapping[str, object]) -> tuple[str, ...]:
    """Return where a server is, as its description says it."""
    if isinstance(url := value.get("url"), str):
        return (url,)
    args = value.get("args")
    parts = [value.get("command"), *(args if isinstance(args, list | tuple) else ())]
    return tuple(map(str, parts))

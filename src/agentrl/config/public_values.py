"""Which values of a configuration are secrets, and what people are shown of the others.

In goes a configuration; out come its values in the form in which they may be written anywhere
(`public_value`), and the secrets that stand in them (`secrets_of`).
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import SecretStr

from agentrl.config.secret_text import (
    HIDDEN,
    public_command,
    redact,
    secrets_of_command,
    secrets_of_url,
)
from agentrl.config.sections import SECTIONS, RootConfig


def public_value(name: str, value: Any) -> Any:
    """Return a flag's value as it may be shown; the same value where nothing in it is secret."""
    if isinstance(value, str):
        if name == "tool_server_command":
            return " ".join(public_command(_words(value)))
        if name == "mcp_servers" and value.lstrip().startswith("{"):
            return json.dumps(_public_servers(_json(value)))
        return redact(value)
    if isinstance(value, Mapping):
        return {key: public_value(name, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(public_value(name, inner) for inner in value)
    return value


def secrets_of(config: RootConfig) -> Iterator[str]:
    """Yield the secrets in a configuration, those inside URLs and commands included."""
    for section in SECTIONS:
        for name, value in getattr(config, section):
            if isinstance(value, SecretStr):
                text = value.get_secret_value()
                yield from secrets_of_url(text) if "://" in text else [text]
            elif name == "tool_server_command" and value:
                yield from secrets_of_command(_words(value))
            elif name == "mcp_servers" and value and value.lstrip().startswith("{"):
                yield from _server_secrets(_json(value))
            else:
                yield from _url_secrets(value)


def _url_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from secrets_of_url(value) if "://" in value else ()
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _url_secrets(inner)


def _public_servers(value: Any) -> Any:
    """Return `mcpServers` with the names of all things and the values of harmless ones."""
    if not isinstance(value, dict):
        return redact(value) if isinstance(value, str) else value
    shown: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "args":
            shown[key] = [HIDDEN] * len(inner) if isinstance(inner, list) else HIDDEN
        elif key in ("headers", "env") and isinstance(inner, dict):
            shown[key] = {name: _variable_or_hidden(text) for name, text in inner.items()}
        elif key == "command" and isinstance(inner, str):
            shown[key] = " ".join(public_command(_words(inner)))
        else:
            shown[key] = _public_servers(inner)
    return shown


def _server_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _url_secrets(value)
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key == "args" and isinstance(inner, list):
            yield from secrets_of_command(str(word) for word in inner)
        elif key in ("headers", "env") and isinstance(inner, dict):
            yield from (str(text) for text in inner.values() if _variable_or_hidden(text) == HIDDEN)
        else:
            yield from _server_secrets(inner)


def _variable_or_hidden(text: Any) -> str:
    return text if isinstance(text, str) and text.startswith("${") else HIDDEN


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an open quotation mark, which is reported where the command is started
        return command.split()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # reported with its position where the servers are read
        return HIDDEN

"""Types of flags with secrets: the whole value for its consumer, a public part for all others.

Input: a value as the user gave it. `get_secret_value()` returns it whole; everything else (text,
`repr`, JSON, messages) shows only the public part. `secrets_of` lists the secrets for
`secret_text.redact`.
"""

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Secret, SecretStr

from agentrl.config.secret_text import (
    HIDDEN,
    public_command,
    redact,
    secrets_of_command,
    secrets_of_url,
)


class PartlySecret(ABC):
    """Extends pydantic's `Secret` for values that are public in parts."""

    @property
    @abstractmethod
    def public(self) -> Any:
        """The value with `***` for its secrets."""

    @abstractmethod
    def secrets(self) -> Iterator[str]:
        """Yield the secrets in it."""

    def _display(self) -> str:
        return str(self.public)


class SecretUrl(PartlySecret, Secret[str]):
    """An address; its user part and the values of its query are secrets."""

    @property
    def public(self) -> str:
        """The address without its secrets."""
        return redact(self.get_secret_value())

    def secrets(self) -> Iterator[str]:
        """Yield the user part and the values of the query."""
        yield from secrets_of_url(self.get_secret_value())


class SecretCommand(PartlySecret, Secret[str]):
    """A command line; any argument may be a secret."""

    @property
    def public(self) -> str:
        """The command with `***` for words that may be secrets."""
        return " ".join(public_command(_split_command(self.get_secret_value())))

    def secrets(self) -> Iterator[str]:
        """Yield the arguments that are secrets by their names."""
        yield from secrets_of_command(_split_command(self.get_secret_value()))


class SecretServers(PartlySecret, Secret[str]):
    """An `mcpServers` mapping: JSON, a file that contains it, or the address of one server."""

    @property
    def public(self) -> str:
        """The mapping without arguments, headers and variables; a file's path as it is."""
        text = self.get_secret_value()
        return json.dumps(_public_servers(_parse_json(text))) if self.is_json else redact(text)

    @property
    def is_json(self) -> bool:
        """Whether the mapping itself was given."""
        return self.get_secret_value().lstrip().startswith("{")

    def secrets(self) -> Iterator[str]:
        """Yield the values of headers and variables, secret arguments, and secret parts of URLs."""
        text = self.get_secret_value()
        yield from _server_secrets(_parse_json(text)) if self.is_json else _url_secrets(text)


class SecretRoutes(PartlySecret, Secret[dict[str, dict[str, str]]]):
    """Other models by name; their addresses may contain secrets."""

    @property
    def public(self) -> dict[str, dict[str, str]]:
        """The models with redacted addresses."""
        return {
            name: {key: redact(text) for key, text in route.items()}
            for name, route in self.get_secret_value().items()
        }

    def secrets(self) -> Iterator[str]:
        """Yield the secret parts of the addresses."""
        for route in self.get_secret_value().values():
            for text in route.values():
                yield from _url_secrets(text)


SECRET_TYPES = (SecretStr, Secret)


def revealed(value: Any) -> Any:
    """Return a flag's value, including its secrets."""
    if isinstance(value, SECRET_TYPES):
        return value.get_secret_value()
    return value


def published(value: Any) -> Any:
    """Return the public form of a flag's value; None if the whole value is a secret."""
    if isinstance(value, SecretStr):
        return None
    if isinstance(value, PartlySecret):
        return value.public
    return value


def secrets_of(value: Any) -> Iterator[str]:
    """Yield the secrets in a flag's value."""
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        yield from secrets_of_url(text) if "://" in text else [text]
    elif isinstance(value, PartlySecret):
        yield from value.secrets()


def _url_secrets(text: str) -> Iterator[str]:
    yield from secrets_of_url(text) if "://" in text else ()


def _public_servers(value: Any) -> Any:
    """Return `mcpServers` with all names, but only those values that cannot be secrets."""
    if not isinstance(value, dict):
        return redact(value) if isinstance(value, str) else value
    public: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "args":
            public[key] = [HIDDEN] * len(inner) if isinstance(inner, list) else HIDDEN
        elif key in ("headers", "env") and isinstance(inner, dict):
            public[key] = {name: _variable_or_hidden(text) for name, text in inner.items()}
        elif key == "command" and isinstance(inner, str):
            public[key] = " ".join(public_command(_split_command(inner)))
        else:
            public[key] = _public_servers(inner)
    return public


def _server_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _url_secrets(value)
    if not isinstance(value, Mapping):
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


def _split_command(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quotation mark is reported where the command is started
        return command.split()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # reported where the servers are read
        return HIDDEN

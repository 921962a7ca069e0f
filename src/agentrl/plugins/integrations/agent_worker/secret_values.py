"""Secrets in an agent's configuration: kept out of files and passed in the environment.

A value under a key such as Authorization or api_key, or an address with a secret, is replaced by
`${NAME}`, and the environment variable NAME holds it. Existing references are unchanged.
"""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agentrl.errors import ConfigError

_SECRET_KEY = re.compile(
    r"authorization|token$|secret|password|passwd|cookie|credential|(^|[_-])key$|api[_-]?key", re.I
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_BEARER = re.compile(r"(?i)(bearer|basic)\s+(?=\S)")


class SecretValues:
    """Collects the secrets of one agent under environment variable names."""

    def __init__(self, prefix: str) -> None:
        """Start without secrets."""
        self._prefix = re.sub(r"\W+", "_", prefix, flags=re.ASCII).strip("_").upper()
        self.environment: dict[str, str] = {}

    def replaced(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return a copy of a JSON value in which every secret is a reference."""
        if isinstance(value, Mapping):
            return {key: self.replaced(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.replaced(item, (*path, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, str) or not value:
            return value
        if path and _SECRET_KEY.search(path[-1]):
            # The word Bearer is kept, so that a variable such as MCP_SERVER_TOKEN matches the rest.
            scheme = _BEARER.match(value)
            start = scheme.end() if scheme else 0
            return value[:start] + self._reference(value[start:], path)
        return self._reference(value, path) if _contains_secret(value) else value

    def _reference(self, secret: str, path: tuple[str, ...]) -> str:
        if _REFERENCE.search(secret):
            return secret
        for name, known in {**os.environ, **self.environment}.items():
            # The user's own variable is easier to recognize than a generated one.
            if known == secret and _SECRET_KEY.search(name):
                return f"${{{name}}}"
        words = re.sub(r"\W+", "_", "_".join(path[-2:]), flags=re.ASCII).strip("_").upper()
        name = base = f"{self._prefix}_{words}"
        number = 1
        while name in self.environment:
            number += 1
            name = f"{base}_{number}"
        self.environment[name] = secret
        return f"${{{name}}}"


def resolved(value: Any) -> Any:
    """Return a copy of a JSON value with every `${NAME}` replaced from the environment."""
    if isinstance(value, Mapping):
        return {key: resolved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item) for item in value]
    return _REFERENCE.sub(_look_up, value) if isinstance(value, str) else value


def _look_up(match: "re.Match[str]") -> str:
    name = match[1]
    if name not in os.environ:
        raise ConfigError(
            f"agent: environment variable {name} is not set; it must contain a secret"
        )
    return os.environ[name]


def _contains_secret(text: str) -> bool:
    if "://" not in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.password is not None or any(
            _SECRET_KEY.search(key) for key, _ in parse_qsl(parts.query)
        )
    except ValueError:
        return False

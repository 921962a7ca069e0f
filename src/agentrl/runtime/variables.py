"""Environment variables in the texts of files: `${NAME}` and `${NAME:-default}`."""

import os
import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(?:env:)?(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", re.ASCII)


def with_variables(value: Any, *, kept: re.Pattern[str] | None = None) -> Any:
    """Return a value with the variables in all its strings substituted, but for those `kept`.

    Raises:
        ConfigError: a variable is not set; the caller names the file.
    """
    if isinstance(value, str):
        return _VARIABLE.sub(
            lambda found: found[0] if kept and kept.fullmatch(found[0]) else _value(found), value
        )
    if isinstance(value, Mapping):
        return {key: with_variables(item, kept=kept) for key, item in value.items()}
    if isinstance(value, list):
        return [with_variables(item, kept=kept) for item in value]
    return value


def _value(found: re.Match[str]) -> str:
    name, default = found["name"], found["default"]
    value = os.environ.get(name) or default
    if value is None and name not in os.environ:
        raise ConfigError(
            f"the environment variable {name} is not set; set it, or give a default as in "
            "${NAME:-default}"
        )
    return value or ""

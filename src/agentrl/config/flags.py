"""The table of flags: every field of every section is one flag of the same name.

This module knows names, types and help texts. It parses nothing (`command_line`) and checks no
values (`loading`, `checks`).
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from agentrl.config.other_names import (
    ALIASES,
    NO_EFFECT,
    ONE_VALUE,
    OPTIM_PARTS,
    SHORTHANDS,
    elsewhere,
)
from agentrl.config.secret_types import (
    SECRET_TYPES,
    SecretCommand,
    SecretRoutes,
    SecretServers,
    SecretUrl,
)
from agentrl.config.sections import SECTIONS

USUAL = (
    *("run_name", "model_name_or_path", "lora_rank", "train_file", "eval_file", "env"),
    *("num_generations", "max_new_tokens", "max_turns", "scorer_module"),
    *("mcp_servers", "tool_server_command", "agent", "inference_backend", "inference_gpus"),
    *("loss_calculator", "max_steps", "groups_per_step", "learning_rate", "trainer_gpus"),
)
"""Common flags: `--help` shows them first; `--help-all` shows all others, too."""

_VALUE_NAMES: dict[Any, str] = {
    bool: "",
    int: "N",
    float: "X",
    str: "TEXT",
    Path: "PATH",
    SecretStr: "SECRET",
    SecretUrl: "URL",
    SecretCommand: "COMMAND",
    SecretServers: "TEXT",
    SecretRoutes: "JSON",
    dict: "JSON",
    tuple: "A,B,...",
}


@dataclass(frozen=True)
class Flag:
    """One flag: its section, its field and the type of its values."""

    name: str
    section: str
    field: FieldInfo

    @property
    def is_bool(self) -> bool:
        """Whether the flag may be given without a value."""
        return self.field.annotation is bool

    @property
    def is_tuple(self) -> bool:
        """Whether the flag takes a comma-separated list."""
        return self._kind is tuple

    @property
    def is_path(self) -> bool:
        """Whether the flag names a file or a directory."""
        return self._kind is Path

    @property
    def is_text(self) -> bool:
        """Whether the flag takes any text."""
        return self._kind is str

    @property
    def is_mapping(self) -> bool:
        """Whether the flag takes a JSON object."""
        return self._kind in (dict, SecretRoutes)

    @property
    def is_secret(self) -> bool:
        """Whether the value, or part of it, is a secret."""
        return isinstance(self._kind, type) and issubclass(self._kind, SECRET_TYPES)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help texts: its choices, or its type."""
        return "|".join(self.choices) or _VALUE_NAMES[self._kind]

    @property
    def choices(self) -> tuple[str, ...]:
        """The named values that the flag accepts, if any."""
        return get_args(self._type) if get_origin(self._type) is Literal else ()

    @property
    def description(self) -> str:
        """The field's docstring."""
        return " ".join((self.field.description or "").split())

    @property
    def default(self) -> str:
        """The default as it would be typed; empty if there is none."""
        default: Any = self.field.default
        if default is None:
            return ""
        if isinstance(default, tuple):
            return ",".join(default)
        return str(default).lower() if self.is_bool else str(default)

    @property
    def help(self) -> str:
        """The description with the default."""
        return f"{self.description} [{self.default}]" if self.default else self.description

    @property
    def _type(self) -> Any:
        """The field's type without `None`."""
        alternatives = get_args(self.field.annotation)
        return alternatives[0] if type(None) in alternatives else self.field.annotation

    @property
    def _kind(self) -> Any:
        """The field's type without parameters: `dict` for `dict[str, str] | None`."""
        return get_origin(self._type) or self._type


FLAGS: dict[str, Flag] = {
    name: Flag(name, section, field)
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
}


def canonical_name(flag: str) -> str:
    """Return the field name behind a flag as typed (`--max-steps` -> `max_steps`)."""
    name = flag.lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def nearest_name(name: str) -> str | None:
    """Return the known flag that a misspelled one most resembles, if any does."""
    known = [*FLAGS, *ALIASES, *NO_EFFECT, *ONE_VALUE, *OPTIM_PARTS, *SHORTHANDS]
    # Below this similarity, names share a word but differ in meaning: `batch_size` and `tp_size`.
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return matches[0] if matches else None


def unknown_flag(name: str) -> str:
    """Return the message about a flag that does not exist."""
    explanation = elsewhere(name)
    if explanation is not None:
        return f"--{name}: {explanation}"
    nearest = nearest_name(name)
    hint = f"; did you mean --{nearest}?" if nearest else "; see --help"
    return f"unknown flag --{name}{hint}"

"""`--env KIND:NAME?size=20&seed=1`: the environment, its arguments and its interpreter.

Input: the user's text. Output: an `EnvironmentUri`, or a one-line `ConfigError`. Only the
interpreter that has its package knows whether the environment exists (`EnvironmentProcess`).
"""

import hashlib
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from agentrl.errors import ConfigError
from agentrl.runtime.printable import one_line
from agentrl.schema import EnvironmentTask

_MAX_SHOWN, _MAX_DIGITS = 40, 20
_NOT_IN_IDS = re.compile(r"[^\w.-]+")
_REPLAYABLE = "replayable"
PLACE = Path(".agentrl/environments")
"""Folder of the environments' own interpreters, one folder a kind."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """What flags and messages depend on."""

    packages: str = ""
    """What `pip` installs for it; empty if it needs no package."""
    is_seeded: bool = False
    """Whether its tasks are drawn with a seed."""
    is_replayable: bool = False
    """Whether the same replies lead a task to the same state, so that a rollout can start at a turn of
    another by repeating its replies; `?replayable=true` declares it for one environment."""
    starts_programs: bool = False
    """Whether its rollouts start their own programs, on the cores of the sampler's machine."""


ENVIRONMENTS = {
    "reasoning_gym": EnvironmentFacts("reasoning-gym==0.1.25", is_seeded=True, is_replayable=True),
    "textarena": EnvironmentFacts("textarena==0.7.4", is_seeded=True, is_replayable=True),
    # Its harnesses are programs that uv runs.
    "verifiers": EnvironmentFacts("verifiers==0.4.0 uv", starts_programs=True),
    "openenv": EnvironmentFacts("openenv-core==0.3.0", is_seeded=True),
    "harbor": EnvironmentFacts(is_replayable=True, starts_programs=True),
    # Without its dependencies, which are the clients of all vendors of models: with those of its checkers.
    "bfcl": EnvironmentFacts(
        "--no-deps bfcl-eval==2026.3.23 filelock mpmath tenacity tree_sitter==0.21.3 "
        "tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4",
        is_replayable=True,
    ),
}
"""By the KIND of `--env KIND:NAME`; `environment_kinds` implements them, in the interpreters that have the
packages."""


@dataclass(frozen=True)
class EnvironmentUri:
    """One environment."""

    kind: str
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    is_replayable: bool = field(default=False, compare=False, repr=False)
    """Whether the same replies lead its tasks to the same states."""

    @classmethod
    def parse(cls, text: str, flag: str = "--env") -> "EnvironmentUri":
        """Return the environment that a text names.

        Raises:
            ConfigError: the text does not name an environment.
        """
        kind, _, rest = text.partition(":")
        name, _, query = rest.partition("?")
        if kind not in ENVIRONMENTS:
            near = get_close_matches(kind, ENVIRONMENTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{flag} {text}: unknown kind {kind!r}{hint} (known: {', '.join(ENVIRONMENTS)}); write "
                "KIND:NAME"
            )
        if not name:
            raise ConfigError(f"{flag} {text}: no environment name; write {kind}:NAME")
        pairs = parse_qsl(query, keep_blank_values=True)
        given = [name for name, _ in pairs]
        if len(set(given)) < len(given) or len(pairs) != len(list(filter(None, query.split("&")))):
            raise ConfigError(f"{flag} {text}: give each parameter once, as in ?size=20&seed=1")
        try:
            args = {key: _value(key, value) for key, value in pairs}
        except ConfigError as error:
            raise ConfigError(f"{flag} {kind}:{name}: {error}") from None
        is_replayable = args.pop(_REPLAYABLE, ENVIRONMENTS[kind].is_replayable)
        if not isinstance(is_replayable, bool):
            raise ConfigError(f"{flag} {kind}:{name}: {_REPLAYABLE} is true or false")
        return cls(kind, name, args, is_replayable)

    @classmethod
    def of(cls, task: EnvironmentTask) -> "EnvironmentUri":
        """Return the environment of a task."""
        kind, _, name = task.env_id.partition(":")
        return cls(kind, name, task.args)

    @property
    def is_seeded(self) -> bool:
        """Whether its tasks are drawn with a seed."""
        return ENVIRONMENTS[self.kind].is_seeded

    @property
    def env_id(self) -> str:
        """`KIND:NAME`."""
        return f"{self.kind}:{self.name}"

    @property
    def id_prefix(self) -> str:
        """Prefix of its tasks' ids; depends on all arguments except the size."""
        args = {name: value for name, value in self.args.items() if name != "size"}
        text = json.dumps(args, sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=2).hexdigest()
        return f"{_NOT_IN_IDS.sub('_', self.name)}.{digest}"

    def python(self, given: Path | None) -> str:
        """Return the interpreter that runs it: the given one, the kind's own, or this one.

        Raises:
            ConfigError: the given path is not a program.
        """
        own = PLACE / self.kind / "bin/python"
        if given is None:
            return str(own.absolute()) if own.exists() else sys.executable
        if not os.access(given, os.X_OK) or given.is_dir():
            raise ConfigError(
                f"--env_python {given}: program not found; give the bin/python of an environment"
            )
        return str(given.absolute())

    def install_command(self) -> str:
        """Return the command that installs the kind."""
        folder, packages = PLACE / self.kind, ENVIRONMENTS[self.kind].packages
        return f"python3 -m venv {folder} && {folder}/bin/pip install {packages}"


def _value(key: str, text: str) -> Any:
    """Return a parameter's value: a number, a truth value or a list in JSON, else the text."""
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except OverflowError:
        problem = "expected a number of 64 bits"
    except RecursionError:
        problem = "it nests too deeply"
    except ValueError:
        return text
    raise ConfigError(f"{key}={one_line(text, _MAX_SHOWN)}: {problem}")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS or not -(2**63) <= int(digits) < 2**63:
        raise OverflowError(digits)
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise OverflowError(digits)
    return number

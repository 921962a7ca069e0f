"""Values of flags that name a function: a built-in one, or the user's by its place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from agentrl.config.user_code import load_reference, source_digest
from agentrl.config.value_kinds import CODE, Kind, Naming

REFERENCE = "FILE.py:NAME"
"""Placeholder of a user's function."""


def is_reference(value: str | None) -> bool:
    """Return whether a value names a user's function."""
    return value is not None and ":" in value


def _absolute_reference(value: str) -> str:
    """Return `file.py:name` with an absolute path, because processes have different folders."""
    place, colon, name = value.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise PydanticCustomError(
            "own_function", "give file.py:name or package.module:name of a function"
        )
    if not place.endswith(".py"):
        return value
    return f"{Path(place).expanduser().absolute()}:{name}"


@dataclass(frozen=True)
class BuiltInOr(Naming):
    """Annotation of a string: one of some names, or the reference of a user's function."""

    kind: Kind = field(default="code", init=False)
    names: tuple[str, ...]

    def is_plain(self, value: Any) -> bool:
        """Return whether a value is one of the names."""
        return isinstance(value, str) and value.lower() in map(str.lower, self.names)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate after the value is known to be a string."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if value in self.names:
            return value
        if is_reference(value):
            return _absolute_reference(value)
        if "." in value:
            place, _, name = value.rpartition(".")
            file = f"{place}.py"
            meant = (
                f"{value}:NAME"
                if name == "py"
                else f"{file if Path(file).is_file() else place}:{name}"
            )
            raise PydanticCustomError(
                "own_function", "a function of your own is written {meant}", {"meant": meant}
            )
        raise PydanticKnownError("literal_error", {"expected": ", ".join(self.names)})


OwnFunction = Annotated[str, AfterValidator(_absolute_reference), CODE]
"""The reference of a user's function."""


SOURCES = "own_sources"
"""Key of the digests in a run's stored configuration."""
OWN_FUNCTION_FLAGS = (
    "loss_calculator",
    "advantage_estimator",
    "group_filter",
    "lr_scheduler_type",
    "on_step",
    "branch_rule",
)


def with_sources(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the SHA-256 of the file of each function of the user."""
    digests = {
        name: source_digest(load_reference(values[name], f"--{name}"))
        for name in OWN_FUNCTION_FLAGS
        if is_reference(values.get(name))
    }
    return {**values, SOURCES: digests} if digests else dict(values)

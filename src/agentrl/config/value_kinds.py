"""What the value of a flag can name: code, a path, a command, an address, a secret, or nothing.

Numbers, switches and fixed choices name nothing, and types such as `Path` say what they name. A text
or JSON object can name anything, so its field says it: `Annotated[str, PLAIN]`.
"""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from agentrl.config.secrets import SecretCommand, SecretRoute, SecretServers, SecretUrl

Kind = Literal["plain", "code", "path", "command", "address", "secret"]


@dataclass(frozen=True)
class Naming:
    """Annotation of a field: what its values name."""

    kind: Kind

    @property
    def what(self) -> str:
        """The kind in a sentence."""
        article = "an " if self.kind == "address" else "" if self.kind == "code" else "a "
        return article + self.kind

    def is_plain(self, value: Any) -> bool:
        """Return whether this value names nothing."""
        return self.kind == "plain"


PLAIN = Naming("plain")
CODE = Naming("code")
PATH = Naming("path")
COMMAND = Naming("command")
ADDRESS = Naming("address")
SECRET = Naming("secret")

_OF_TYPES: dict[Any, Naming] = {
    **dict.fromkeys((bool, int, float, NoneType), PLAIN),
    Path: PATH,
    **dict.fromkeys((SecretCommand, SecretServers), COMMAND),
    **dict.fromkeys((SecretUrl, SecretRoute), ADDRESS),
    SecretStr: SECRET,
}


def named_by(field: FieldInfo) -> Naming:
    """Return what the values of a field name."""
    return _named(field.annotation, field.metadata)


def _named(annotation: Any, metadata: Any = ()) -> Naming:
    declared = [one for one in metadata if isinstance(one, Naming)]
    if declared:
        return declared[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _named(arguments[0], arguments[1:])
    if origin is Literal:
        return PLAIN
    if origin in (Union, UnionType, tuple):
        parts = [_named(one) for one in arguments if one is not Ellipsis]
        return next((one for one in parts if one != PLAIN), PLAIN)
    if annotation not in _OF_TYPES:
        raise TypeError(f"annotate {annotation} with what it names, such as PLAIN")
    return _OF_TYPES[annotation]

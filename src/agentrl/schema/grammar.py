"""Grammars that constrain a reply while it is sampled, under SGLang's names.

A structural tag describes what may stand around JSON: thinking, or a tool call in its place. The
forms here are those of XGrammar's structural tags that AgentRL uses.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from agentrl.schema.base import Value

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(Value):
    """A constraint on a reply: tokens that it does not allow are never sampled."""

    kind: GrammarKind
    text: str
    """A JSON schema or a structural tag as JSON, a regular expression, or EBNF."""


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstString(_Form):
    """Exactly this text."""

    type: Literal["const_string"] = "const_string"
    value: str


class AnyText(_Form):
    """Any text; inside a tag, up to the end of the tag."""

    type: Literal["any_text"] = "any_text"


class Regex(_Form):
    """Text that matches the regular expression."""

    type: Literal["regex"] = "regex"
    pattern: str


class JSONSchema(_Form):
    """JSON that is valid under the schema."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: bool | dict[str, JsonValue]


class Tag(_Form):
    """Content between a begin text and an end text."""

    type: Literal["tag"] = "tag"
    begin: str
    content: "Form"
    end: str


class InOrder(_Form):
    """All elements, one after the other."""

    type: Literal["sequence"] = "sequence"
    elements: tuple["Form", ...] = Field(min_length=1)


class OneOf(_Form):
    """Exactly one of the elements."""

    type: Literal["or"] = "or"
    elements: tuple["Form", ...] = Field(min_length=1)


class Maybe(_Form):
    """The content, or nothing."""

    type: Literal["optional"] = "optional"
    content: "Form"


Form = Annotated[
    ConstString | AnyText | Regex | JSONSchema | Tag | InOrder | OneOf | Maybe,
    Field(discriminator="type"),
]


class StructuralTag(_Form):
    """The form of a whole reply."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Form

    def grammar(self) -> Grammar:
        """Return the grammar that a request carries."""
        return Grammar(kind="structural_tag", text=self.model_dump_json())

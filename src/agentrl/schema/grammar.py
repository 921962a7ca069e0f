"""What a reply may be held to while it is sampled, under SGLang's names.

A structural tag says what may stand around JSON: thinking, or a tool call in its place. The forms
here are those of XGrammar's structural tags that AgentRL has a use for.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from agentrl.schema.base import Value

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(Value):
    """What a reply is held to: tokens that it does not allow are not drawn."""

    kind: GrammarKind
    text: str
    """A JSON schema or a structural tag as JSON, a regular expression, or EBNF."""


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstString(_Form):
    """This text."""

    type: Literal["const_string"] = "const_string"
    value: str


class AnyText(_Form):
    """Any text; inside a tag, up to its end."""

    type: Literal["any_text"] = "any_text"


class Regex(_Form):
    """A text that the expression matches."""

    type: Literal["regex"] = "regex"
    pattern: str


class JSONSchema(_Form):
    """JSON that the schema allows."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: bool | dict[str, JsonValue]


class Tag(_Form):
    """Content between two texts."""

    type: Literal["tag"] = "tag"
    begin: str
    content: "Form"
    end: str


class InOrder(_Form):
    """One after the other."""

    type: Literal["sequence"] = "sequence"
    elements: tuple["Form", ...] = Field(min_length=1)


class OneOf(_Form):
    """One of them."""

    type: Literal["or"] = "or"
    elements: tuple["Form", ...] = Field(min_length=1)


class Maybe(_Form):
    """It, or nothing."""

    type: Literal["optional"] = "optional"
    content: "Form"


Form = Annotated[
    ConstString | AnyText | Regex | JSONSchema | Tag | InOrder | OneOf | Maybe,
    Field(discriminator="type"),
]


class StructuralTag(_Form):
    """What a whole reply looks like."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Form

    def grammar(self) -> Grammar:
        """Return it as it is asked for."""
        return Grammar(kind="structural_tag", text=self.model_dump_json())

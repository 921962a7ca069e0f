"""The grammar of a reply that has to be JSON, with what may stand around the JSON."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from agentrl.schema.grammar import (
    AnyText,
    ConstString,
    Form,
    Grammar,
    InOrder,
    JSONSchema,
    Maybe,
    OneOf,
    Regex,
    StructuralTag,
    Tag,
)

Thinking = Literal["none", "optional", "begun"]
"""Whether a reply thinks first; `begun`: the prompt has opened the block."""

_BETWEEN = Regex(pattern=r"\n{0,2}")
"""What models write between thinking and what they say."""


def reply_grammar(
    schema: Mapping[str, Any], *, thinking: Thinking, call_mark: str | None = None
) -> Grammar:
    """Return the grammar of replies that are JSON of a schema.

    Args:
        schema: the JSON schema.
        thinking: whether there may be thinking before.
        call_mark: how tool calls begin that may stand in the JSON's place; what follows the mark
            is free. None: there may be none.
    """
    if thinking == "none" and call_mark is None:
        return Grammar(kind="json_schema", text=json.dumps(schema))
    answer: Form = JSONSchema(json_schema=dict(schema))
    if call_mark is not None:
        answer = OneOf(
            elements=(answer, InOrder(elements=(ConstString(value=call_mark), AnyText())))
        )
    if thinking == "begun":
        thought = Tag(begin="", content=AnyText(), end="</think>")
        answer = InOrder(elements=(thought, _BETWEEN, answer))
    elif thinking == "optional":
        thought = Tag(begin="<think>", content=AnyText(), end="</think>")
        answer = InOrder(elements=(Maybe(content=InOrder(elements=(thought, _BETWEEN))), answer))
    return StructuralTag(format=answer).grammar()

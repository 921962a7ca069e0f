"""Random demonstrations, and whether a model's renderer gives every reply back."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agentrl.errors import RenderError
from agentrl.plugins.sft.demonstrations.demonstration import Demonstration, demonstration_turns
from agentrl.renderers import Renderer
from agentrl.schema import Message, rebuild_images, rebuild_prompts
from agentrl.schema.image import image_addresses, image_part

_PICTURES = ["data:image/png;base64,iVBORw0KGgo=", "data:image/png;base64,iVBORw0KGgoA"]
TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "description": "Order an item.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string"},
                "number": {"type": "integer"},
                "gift": {"type": "boolean"},
                "options": {"type": "object"},
                "tags": {"type": "array"},
            },
        },
    },
}
_LOOKALIKES = ["12", "-0.5", "true", "null", "[]", '{"a": 1}', " padded ", "\n", "1 < 2 > 0"]
"""Texts that a format without types could read as other values."""
_TEXT = st.text(st.sampled_from("abc XYZ.,'\"\\{}[]()=:_-\n/é台🙂"), max_size=24) | st.sampled_from(
    _LOOKALIKES
)
_ONE_IN_EIGHT = st.integers(0, 7).map(lambda number: number == 7)
_WORDS = st.lists(
    st.sampled_from(
        ["lamp", "the price", "naïve", "台灯", "🙂", '"quoted"', "a{b}", "1 < 2", "x\ny"]
    ),
    min_size=1,
    max_size=4,
).map(" ".join)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from([0.5, -1e30])
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "item": _TEXT,
        "number": st.integers(-(10**6), 10**6),
        "gift": st.booleans(),
        "options": st.dictionaries(_WORDS, _VALUES, max_size=3),
        "tags": st.lists(_VALUES, max_size=3),
    },
)


_NAMED = re.compile(r"messages\[\d+\][.:] ?([^:]+)")


@dataclass
class Counts:
    """What became of the demonstrations."""

    demonstrations: int = 0
    replies: int = 0
    there_and_back: int = 0
    """Demonstrations that were accepted; `wrong` counts the replies that then differ."""
    refused: dict[str, int] = field(default_factory=dict)
    """By the field that the refusal names, or by what it says of the whole message."""
    wrong: int = 0
    """Replies that differ, and refusals that name no message."""
    first_wrong: str = ""

    def add_wrong(self, problem: str) -> None:
        """Count a problem."""
        self.wrong += 1
        self.first_wrong = self.first_wrong or problem


@cache
def demonstrations(number: int, image_roles: Collection[str] = ()) -> list[Demonstration]:
    """Return random demonstrations, always the same ones.

    Args:
        number: how many.
        image_roles: roles whose messages may show images.
    """
    made: list[Demonstration] = []

    @seed(0)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_demonstrations(image_roles))
    def make(demonstration: Demonstration) -> None:
        made.append(demonstration)

    make()
    return made


@st.composite
def _demonstrations(draw: st.DrawFn, image_roles: Collection[str]) -> Demonstration:
    """Return conversations with calls, thinking, parallel calls, unicode, empty content, images."""
    messages: list[Message] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "system", "developer"]))
        messages.append({"role": role, "content": draw(_WORDS)})
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": _shown(draw, "user", image_roles)})
        for turn in range(draw(st.integers(0, 2))):
            messages += draw(_answered_calls(f"call-{number}-{turn}", image_roles))
        content = draw(st.sampled_from([None, ""])) if draw(_ONE_IN_EIGHT) else draw(_WORDS)
        messages.append(_with_thinking(draw, {"role": "assistant", "content": content}))
    return Demonstration("d", tuple(messages), (TOOL,), "line 1")


@st.composite
def _answered_calls(draw: st.DrawFn, id_: str, image_roles: Collection[str]) -> list[Message]:
    arguments = draw(st.lists(_ARGUMENTS, min_size=1, max_size=2))
    as_text = draw(st.booleans())  # OpenAI's files have the arguments as text
    calls = [
        {
            "id": f"{id_}-{position}",
            "type": "function",
            "function": {"name": "order", "arguments": json.dumps(one) if as_text else one},
        }
        for position, one in enumerate(arguments)
    ]
    content = draw(st.sampled_from([None, ""]) | _WORDS)
    message: Message = {"role": "assistant", "content": content, "tool_calls": calls}
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": _shown(draw, "tool", image_roles)}
        for call in calls
    ]
    return [_with_thinking(draw, message), *results]


def _shown(draw: st.DrawFn, role: str, image_roles: Collection[str]) -> Any:
    """Return the content of a message to the model: text, perhaps in parts, perhaps with images."""
    text = draw(_WORDS)
    if draw(st.booleans()):
        return text
    parts = [{"type": "text", "text": text}]
    images = draw(st.lists(st.sampled_from(_PICTURES), max_size=2)) if role in image_roles else []
    return draw(st.permutations([*parts, *map(image_part, images)]))


def _with_thinking(draw: st.DrawFn, message: Message) -> Message:
    thinking = draw(st.none() | _WORDS)
    return message if thinking is None else {**message, "reasoning_content": thinking}


def held(renderer: Renderer, num_demonstrations: int) -> Counts:
    """Render demonstrations, and read every reply again."""
    counts = Counts()
    image_roles = frozenset(filter(renderer.shows_images_of, ("user", "tool")))
    for demonstration in demonstrations(num_demonstrations, image_roles):
        counts.demonstrations += 1
        try:
            turns = demonstration_turns(demonstration, renderer, record_id="r", task_id="t")
        except RenderError as error:
            _add_refusal(counts, str(error))
            continue
        counts.there_and_back += 1
        replies = [m for m in demonstration.messages if m["role"] == "assistant"]
        for message, turn, prompt in zip(replies, turns, rebuild_prompts(turns), strict=True):
            counts.replies += 1
            problem = _wrong(renderer, message, turn.output_ids)
            if not problem and not len(prompt):
                problem = "an empty prompt"
            if problem:
                counts.add_wrong(problem)
        if rebuild_images(turns)[-1] != image_addresses(demonstration.messages):
            counts.add_wrong(f"the images differ in {demonstration.messages!r}")
    return counts


def _add_refusal(counts: Counts, text: str) -> None:
    named = _NAMED.match(text)
    field_ = named[1] if named else "no message"
    counts.refused[field_] = counts.refused.get(field_, 0) + 1
    if named is None:
        counts.add_wrong(f"refused without the name of a message: {text}")


def _wrong(renderer: Renderer, message: Message, output_ids: Any) -> str:
    """Return how a reply's tokens differ from its message, judged without the renderer's check."""
    reply = renderer.parse(output_ids, tools=(TOOL,))
    given = [call["function"] for call in message.get("tool_calls", ())]
    expected = [
        json.loads(one["arguments"]) if isinstance(one["arguments"], str) else one["arguments"]
        for one in given
    ]
    if [call.arguments for call in reply.tool_calls] != expected:
        return f"calls {expected!r} became {reply.text!r}"
    if any(call.format_error for call in reply.tool_calls):
        return f"a call cannot be parsed: {reply.text!r}"
    if reply.content.strip() != str(message["content"] or "").strip():
        return f"content {message['content']!r} became {reply.text!r}"
    if reply.reasoning.split() != message.get("reasoning_content", "").split():
        return f"thinking {message.get('reasoning_content')!r} became {reply.text!r}"
    is_empty = not (given or reply.content.strip() or reply.reasoning.strip())
    if len(output_ids) < (1 if is_empty else 2):
        return f"nothing to learn of {message!r}"
    return ""

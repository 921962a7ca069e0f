"""Random demonstrations, and whether a model's renderer gives every reply back."""

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agentrl.errors import RenderError
from agentrl.plugins.sft.demonstrations.demonstration import Demonstration, demonstration_turns
from agentrl.renderers import Renderer
from agentrl.schema import Message, rebuild_prompts
from agentrl.schema.image import image_part

_PICTURE = "data:image/png;base64,iVBORw0KGgo="
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
_TEXT = st.text(st.sampled_from("abc XYZ.,'\"\\{}[]()=:_-\n/é台🙂"), max_size=24)
_WORDS = st.lists(
    st.sampled_from(
        ["lamp", "the price", "naïve", "台灯", "🙂", '"quoted"', "a{b}", "1 < 2", "x\ny"]
    ),
    min_size=1,
    max_size=4,
).map(" ".join)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | _TEXT,
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


@dataclass
class Counts:
    """What became of the demonstrations."""

    demonstrations: int = 0
    replies: int = 0
    there_and_back: int = 0
    """Demonstrations that were accepted; `wrong` counts the replies that then differ."""
    refused: dict[str, int] = field(default_factory=dict)
    """By the field that the refusal names."""
    wrong: int = 0
    first_wrong: str = ""


@st.composite
def demonstrations(draw: st.DrawFn, *, images: bool) -> Demonstration:
    """Return conversations with calls, thinking, parallel calls, unicode, empty content, images."""
    messages: list[Message] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "system", "developer"]))
        messages.append({"role": role, "content": draw(_WORDS)})
    for number in range(draw(st.integers(1, 3))):
        question: Any = draw(_WORDS)
        if draw(st.booleans()):
            question = [{"type": "text", "text": question}]
            if images:
                question.append(image_part(_PICTURE))
        messages.append({"role": "user", "content": question})
        for turn in range(draw(st.integers(0, 2))):
            messages += draw(_answered_calls(f"call-{number}-{turn}"))
        messages.append(_with_thinking(draw, {"role": "assistant", "content": draw(_WORDS)}))
    return Demonstration("d", tuple(messages), (TOOL,), "line 1")


@st.composite
def _answered_calls(draw: st.DrawFn, id_: str) -> list[Message]:
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
        {"role": "tool", "tool_call_id": call["id"], "content": draw(_WORDS)} for call in calls
    ]
    return [_with_thinking(draw, message), *results]


def _with_thinking(draw: st.DrawFn, message: Message) -> Message:
    thinking = draw(st.none() | _WORDS)
    return message if thinking is None else {**message, "reasoning_content": thinking}


def held(renderer: Renderer, num_demonstrations: int) -> Counts:
    """Render demonstrations, and read every reply again."""
    counts = Counts()

    @seed(0)
    @settings(
        max_examples=num_demonstrations,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(demonstrations(images=renderer.shows_images_of("user")))
    def hold(demonstration: Demonstration) -> None:
        counts.demonstrations += 1
        try:
            turns = demonstration_turns(demonstration, renderer, record_id="r", task_id="t")
        except RenderError as error:
            named = str(error).partition("messages[")[2].partition("]")[2].lstrip(".: ")
            reason = named.partition(":")[0] or str(error)
            counts.refused[reason] = counts.refused.get(reason, 0) + 1
            return
        replies = [m for m in demonstration.messages if m["role"] == "assistant"]
        for message, turn, prompt in zip(replies, turns, rebuild_prompts(turns), strict=True):
            counts.replies += 1
            problem = _wrong(renderer, message, turn.output_ids)
            if not problem and not len(prompt):
                problem = "an empty prompt"
            counts.wrong += bool(problem)
            counts.first_wrong = counts.first_wrong or problem
        counts.there_and_back += 1

    hold()
    return counts


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
    if len(output_ids) < 2:
        return f"nothing to learn of {message!r}"
    return ""

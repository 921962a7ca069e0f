"""Parses replies, the output of a model in one turn; also builds the grammar of a JSON reply."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.renderers.thinking import THINK, ThinkingMarks
from agentrl.renderers.tool_calls.call_format import CallSection, ParsedCall, ToolCallFormat, Tools
from agentrl.schema import Message, ToolCall
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

Thinking = Literal["none", "optional", "opened"]
"""Whether a reply thinks first; `opened`: the prompt has opened the block."""

_MAX_FAILED_SEARCHES = 64
"""Limit on unsuccessful searches for calls in one reply. Each search may read the whole rest; with
this limit, time is linear in the length of a reply, however many calls or thoughts it starts.
"""
_AFTER_THINKING = Regex(pattern=r"\n{0,2}")
"""Text that models write between thinking and content."""


@dataclass(frozen=True)
class MessageForm:
    """How a reply is represented in the conversation for the model's chat template to reproduce it."""

    structured: bool = False
    """With its calls as `tool_calls`, not as their text."""
    opened_message: Message | None = None
    """The message itself, if the prompt has opened its thinking; see `TemplateTraits.opened_form`."""
    reasoning_key: str | None = None
    """Field in which the template looks for the thinking of a reply with structured calls."""
    in_channels: bool = False
    """It consists of channels, which its message does not show."""


@dataclass(frozen=True)
class Reply:
    """One turn of the model."""

    text: str
    """Everything it wrote except the end-of-turn token."""
    content: str
    """Text outside thinking and tool calls, which may contain an answer."""
    reasoning: str
    """Its thinking."""
    tool_calls: tuple[ToolCall, ...]
    prose: str = ""
    """Everything except tool calls; includes thinking and its tags."""
    form: MessageForm = MessageForm()

    @property
    def message(self) -> Message:
        """The assistant message that represents this turn in the conversation."""
        form = self.form
        if not (form.in_channels or (form.structured and self.tool_calls)):
            return form.opened_message or {"role": "assistant", "content": self.text}
        message: Message = {"role": "assistant", "content": self.prose.strip()}
        reasoning, content = self.reasoning.strip(), self.content.strip()
        if form.in_channels and self.tool_calls:
            # Alongside a call, the template renders one text only, as thinking.
            reasoning, content = "\n\n".join(filter(None, (reasoning, content))), ""
        if form.reasoning_key is not None and reasoning:
            message |= {form.reasoning_key: reasoning, "content": content}
        if not self.tool_calls:
            return message
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name or "unknown", "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        return {**message, "tool_calls": calls}


def parse_reply(
    text: str,
    format_: ToolCallFormat,
    *,
    starts_inside: bool = False,
    turn: int = 0,
    tools: Tools = (),
    marks: ThinkingMarks = THINK,
    form: MessageForm | None = None,
) -> Reply:
    """Parse the text of one turn.

    Thinking and calls are told apart from left to right: a `<think>` inside a call is part of the
    call, a call inside thinking is part of the thinking. Unclosed thinking ends where the
    well-formed calls at the end of the reply start, if any.
    """
    if format_.split is not None:
        reasoning, content, found = format_.split(text, tools)
        prose = content
    else:
        splitter = _Splitter(text, format_, tools, marks)
        splitter.split(inside=starts_inside)
        parts = (splitter.reasoning, splitter.content, splitter.prose)
        reasoning, content, prose = map("".join, parts)
        found = splitter.calls
    return Reply(
        text=text,
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(_numbered(found, format_, turn)),
        prose=prose,
        form=form or MessageForm(),
    )


def _numbered(found: Sequence[ParsedCall], format_: ToolCallFormat, turn: int) -> list[ToolCall]:
    """Return the calls of a turn, each with an id."""
    used: set[str] = set()
    calls: list[ToolCall] = []
    for position, call in enumerate(found):
        has_id = format_.own_id is not None and format_.own_id.fullmatch(call.id) is not None
        id_ = call.id if has_id and call.id not in used else format_.call_id(turn, position)
        used.add(id_)
        calls.append(
            ToolCall(
                id=id_, name=call.name, arguments=call.arguments, format_error=call.format_error
            )
        )
    return calls


class _Splitter:
    """Splits a reply in one pass, from left to right."""

    def __init__(
        self, text: str, format_: ToolCallFormat, tools: Tools, marks: ThinkingMarks
    ) -> None:
        self._text = text
        self._format = format_
        self._tools = tools
        self._marks = marks
        self._has_thinking = False
        self._has_content = False
        self._next: tuple[int, CallSection | None] | None = None
        self._num_failed_searches = 0
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.prose: list[str] = []
        self.calls: list[ParsedCall] = []

    def split(self, *, inside: bool) -> None:
        position = self._read_thinking(0) if inside else 0
        self.prose.append(self._text[:position])
        while position < len(self._text):
            position = self._read_content(position)

    def _read_thinking(self, position: int) -> int:
        """Read thinking that starts at `position`; return its end."""
        self._has_thinking = True
        end = self._text.find(self._marks.close, position)
        if end >= 0:
            self.reasoning.append(self._text[position:end])
            return end + len(self._marks.close)
        end = self._start_of_final_calls(position)
        self.reasoning.append(self._text[position:end])
        return end

    def _start_of_final_calls(self, position: int) -> int:
        """Return the start of the well-formed calls at the end of the reply, or its end."""
        begin: int | None = None
        until = position
        section = self._next_marked(position)
        while section is not None:
            if begin is None or self._text[until : section.start].strip():
                begin = section.start
            until = section.end
            if any(call.format_error is not None for call in section.calls):
                begin = None
            section = self._next_marked(until)
        if begin is None or self._text[until:].strip():
            return len(self._text)
        return begin

    def _read_content(self, position: int) -> int:
        """Read content from `position`, and the call or thinking that ends it; return the end."""
        text = self._text
        section = self._section(position)
        until = len(text) if section is None else section.start
        mark = self._marks.either.search(text, position, until)
        if mark is not None and mark[0] == self._marks.close:
            # The opening mark is missing: the prompt may have opened the block.
            self.reasoning += [*self.content, text[position : mark.start()]]
            self.content.clear()
            self._has_content = False
            if not self._has_thinking:
                self.calls.clear()
            self._has_thinking = True
            self.prose.append(text[position : mark.end()])
            return mark.end()
        if mark is not None:
            self._add_content(text[position : mark.start()])
            end = self._read_thinking(mark.end())
            self.prose.append(text[position:end])
            return end
        self._add_content(text[position:until])
        self.prose.append(text[position:until])
        if section is None:
            return len(text)
        self.calls += section.calls
        return section.end

    def _add_content(self, text: str) -> None:
        self.content.append(text)
        self._has_content = self._has_content or bool(text.strip())

    def _section(self, position: int) -> CallSection | None:
        leading = self._format.scan_leading
        if leading is not None and not self.calls and not self._has_content and self._may_search:
            section = leading(self._text, position, self._tools)
            if section is not None:
                return section
            self._num_failed_searches += 1
        return self._next_marked(position)

    @property
    def _may_search(self) -> bool:
        return self._num_failed_searches < _MAX_FAILED_SEARCHES

    def _next_marked(self, position: int) -> CallSection | None:
        """Return the next section of calls; the result of a search is reused while it is valid."""
        if self._format.scan is None:
            return None
        if self._next is not None:
            begin, section = self._next
            if begin <= position and (section is None or position <= section.start):
                return section
            if section is not None and position < section.end:
                self._num_failed_searches += 1  # a part of it turned out to be thinking
        if not self._may_search:
            return None
        section = self._format.scan(self._text, position, self._tools)
        if section is not None and any(call.format_error is not None for call in section.calls):
            self._num_failed_searches += 1
        self._next = position, section
        return section


def reply_grammar(
    schema: Mapping[str, Any],
    *,
    thinking: Thinking,
    marks: ThinkingMarks = THINK,
    call_mark: str | None = None,
) -> Grammar:
    """Return the grammar of replies that are JSON conforming to a schema.

    Args:
        schema: the JSON schema.
        thinking: whether thinking may precede the JSON.
        marks: the marks of thinking.
        call_mark: start of tool calls that may replace the JSON; text after it is unconstrained.
            None: no calls are allowed.
    """
    if thinking == "none" and call_mark is None:
        return Grammar(kind="json_schema", text=json.dumps(schema))
    answer: Form = JSONSchema(json_schema=dict(schema))
    if call_mark is not None:
        answer = OneOf(
            elements=(answer, InOrder(elements=(ConstString(value=call_mark), AnyText())))
        )
    if thinking == "opened":
        block = Tag(begin="", content=AnyText(), end=marks.close)
        answer = InOrder(elements=(block, _AFTER_THINKING, answer))
    elif thinking == "optional":
        block = Tag(begin=marks.open, content=AnyText(), end=marks.close)
        answer = InOrder(
            elements=(Maybe(content=InOrder(elements=(block, _AFTER_THINKING))), answer)
        )
    return StructuralTag(format=answer).grammar()

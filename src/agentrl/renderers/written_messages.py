"""Writes the parts of messages that a chat template leaves out, as the model itself would.

A template may show no calls, only one call, no thinking, or no text beside a call. Trials with short
conversations find out: what a template writes of a message must, read as a reply, give the message
back. Where it does not, the message gets its calls and its thinking as text, in the forms in which
rollouts have them.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.errors import RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.reply import Reply, parse_reply
from agentrl.renderers.template_traits import REASONING_KEYS, TemplateTraits, opening
from agentrl.renderers.tool_calls.call_format import ToolCallFormat, Tools
from agentrl.renderers.tool_calls.call_writers import CallToWrite, as_json
from agentrl.renderers.untrusted_text import EscapedConversation
from agentrl.schema import Message

_PROBE = "\U000f0000"
_MARK = "\U0010fffd"
_QUESTION: Message = {"role": "user", "content": "x"}


class _Shape(NamedTuple):
    """What a reply consists of."""

    num_calls: int
    """At most 2, which stands for several."""
    has_reasoning: bool
    has_content: bool


class MessageWriter:
    """Writes messages for one template and one format of calls."""

    def __init__(
        self,
        template: ChatTemplate,
        traits: TemplateTraits,
        format_: ToolCallFormat,
        stops: Collection[str],
    ) -> None:
        """Prepare for a template."""
        self._stops = stops
        self._template = template
        self._traits = traits
        self._format = format_
        self._key = traits.reasoning_key or REASONING_KEYS[0]
        self._shown: dict[_Shape, bool] = {}

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose every part the template shows."""
        if not self._traits.shows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if not self._traits.shows_system:
            messages = _with_system_in_question(messages)
        return [
            self._written_reply(message) if message["role"] == "assistant" else message
            for message in messages
        ]

    def reply_texts(self, conversation: EscapedConversation, closed: str) -> Iterator[str]:
        """Yield the texts after the prompt that may give the last message, the likeliest first.

        Each includes what ends the turn, if the template writes that with the message.
        """
        *before, message = conversation.messages
        prompt = conversation.rendered(self._template, len(before), add_generation_prompt=True)
        if closed.startswith(prompt):
            yield closed[len(prompt) :]
        if self._format.split is not None:
            # Once a final answer follows, the template removes the thinking before it.
            alone = self._alone(message, conversation.tools)
            if alone is not None:
                yield alone
            yield from self._with_preamble(conversation.given[-1], conversation.tools)
            return
        if not message.get("tool_calls"):
            yield self._as_text(message, "") + (self._traits.close_text or "")
            return
        bare = {**_without_reasoning(message), "content": ""}
        with_calls = self._template.render(
            [*before, bare], conversation.tools, add_generation_prompt=False
        )
        end = self._traits.close_text or ""
        if with_calls.startswith(prompt):
            # The template's own text of the calls, and its end of the turn.
            calls = self._without_empty_thinking(with_calls[len(prompt) :])
            yield self._as_text(message, calls)
            end = self.until_stop(calls)[1]
        if self._format.write is not None:
            yield self._as_text(message, self._format.write(calls_of(message))) + end

    def _with_preamble(self, given: Message, tools: Tools) -> Iterator[str]:
        """Yield a reply whose text stands between its thinking and its call, if it can have one."""
        content, reasoning = _text_of(given).strip(), reasoning_of(given)
        if not (content and given.get("tool_calls") and self._format.preamble):
            return
        bare = {**_without_reasoning(given), "content": ""}
        call = self._alone(bare, tools)
        both = self._alone({**bare, self._key: reasoning}, tools) if reasoning else call
        if call and both and both.endswith(call):
            yield both.removesuffix(call) + self._format.preamble % content + call

    def until_stop(self, text: str) -> tuple[str, str]:
        """Return a text up to its first end of turn, inclusive, and this end; without one, ''."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        position, stop = min(found, default=(len(text), ""))
        return text[: position + len(stop)], stop

    def difference(self, message: Message, reply: Reply, tools: Tools) -> str | None:
        """Return how a reply differs from the message that it should give, or None."""
        given = parse_reply(_text_of(message), self._format, tools=tools, marks=self._traits.marks)
        calls = [(call.name, call.arguments) for call in given.tool_calls]
        for position, call in enumerate(calls_of(message)):
            if not isinstance(call.arguments, Mapping):
                return f"tool_calls[{position}].function.arguments is not a JSON object"
            calls.append((call.name, dict(call.arguments)))
        read = [(call.name, call.arguments) for call in reply.tool_calls]
        faults = [call.format_error for call in reply.tool_calls if call.format_error]
        if faults and not any(call.format_error for call in given.tool_calls):
            return f"tool_calls: {_short(calls)} cannot be read back ({faults[0]})"
        if _canonical(read) != _canonical(calls):
            return f"tool_calls: {_short(calls)} reads back as {_short(read)}"
        reasoning = f"{reasoning_of(message)} {given.reasoning}"
        if reply.reasoning.split() != reasoning.split():
            return f"thinking: {_short(reasoning.strip())} reads back as {_short(reply.reasoning)}"
        if reply.content.strip() != given.content.strip():
            return f"content: {_short(given.content)} reads back as {_short(reply.content)}"
        return None

    def _written_reply(self, message: Message) -> Message:
        calls, reasoning = calls_of(message), reasoning_of(message)
        if not (calls or reasoning):
            return message
        if reasoning:
            message = {**_without_reasoning(message), self._key: reasoning}
        if self._format.split is not None:
            return _with_one_text(message, self._key) if calls and reasoning else message
        if calls and self._traits.wants_structured_calls:
            if reasoning and self._traits.reasoning_key is None:
                message = {**_without_reasoning(message), "content": self._as_text(message, "")}
            return message
        shape = _Shape(min(len(calls), 2), bool(reasoning), bool(_text_of(message).strip()))
        if self._shows(shape):
            return message
        text = self._as_text(message, self._write(calls) if calls else "")
        if self._traits.starts_inside_thinking:
            return self._traits.opened_message(text)
        return {"role": "assistant", "content": text}

    def _write(self, calls: Sequence[CallToWrite]) -> str:
        if self._format.write is None:
            raise RenderError(
                "tool_calls: the chat template does not show them, and calls in the format "
                f"{self._format.names[0]} can only be written by a template; give one with "
                "--chat_template FILE, or another --tool_call_parser"
            )
        return self._format.write(calls)

    def _as_text(self, message: Message, calls: str) -> str:
        """Return a reply as its model would write it after the prompt."""
        content, reasoning = _text_of(message), reasoning_of(message).strip("\n")
        marks, thinking = self._traits.marks, ""
        if self._traits.starts_inside_thinking:
            content = content.removeprefix(opening(self._traits.prompt_text, marks))
            if reasoning or marks.close not in content:
                thinking = f"{reasoning}\n{marks.close}\n\n"
        elif reasoning:
            thinking = f"{marks.open}\n{reasoning}\n{marks.close}\n\n"
        gap = "\n" if content.strip() and calls else ""
        return f"{thinking}{content}{gap}{calls.lstrip()}"

    def _without_empty_thinking(self, text: str) -> str:
        before, found, after = text.partition(self._traits.marks.close)
        is_empty = found and not before.replace(self._traits.marks.open, "", 1).strip()
        return after if is_empty else text

    def _shows(self, shape: _Shape) -> bool:
        """Return whether the template's text of a reply of this shape gives the reply back."""
        if shape not in self._shown:
            self._shown[shape] = self._try(shape)
        return self._shown[shape]

    def _try(self, shape: _Shape) -> bool:
        message: Message = {"role": "assistant", "content": _PROBE if shape.has_content else ""}
        if shape.has_reasoning:
            message[self._key] = f"a{_PROBE}"
        if shape.num_calls:
            message["tool_calls"] = [self._probe_call(number) for number in range(shape.num_calls)]
        try:
            alone = self._alone(message, ())
        except RenderError:
            return False
        if alone is None:
            return False
        text, stop = self.until_stop(alone)
        reply = parse_reply(
            text.removesuffix(stop),
            self._format,
            starts_inside=self._traits.starts_inside_thinking,
            marks=self._traits.marks,
        )
        return self.difference(message, reply, ()) is None

    def _alone(self, message: Message, tools: Tools) -> str | None:
        """Return the template's text of a first reply; None if it is not one after the prompt."""
        prompt = self._template.render([_QUESTION], tools, add_generation_prompt=True)
        closed = self._template.render([_QUESTION, message], tools, add_generation_prompt=False)
        return closed[len(prompt) :] if closed.startswith(prompt) else None

    def _probe_call(self, number: int) -> dict[str, Any]:
        return {
            "id": self._format.call_id(0, number),
            "type": "function",
            "function": {"name": "f", "arguments": {"k": f"{_PROBE}{number}"}},
        }


def calls_of(message: Message) -> list[CallToWrite]:
    """Return the structured calls of a message, in OpenAI's form or as bare functions."""
    calls = []
    for position, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RenderError(f"tool_calls[{position}]: expected an object with a function's name")
        arguments: Any = function.get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # kept as an unreadable text
                arguments = json.loads(arguments)
        calls.append(CallToWrite(function["name"], arguments, str(call.get("id") or "")))
    return calls


def with_call_ids(messages: Sequence[Message], format_: ToolCallFormat) -> list[Message]:
    """Return a conversation whose calls have the ids of a rollout; see `Renderer.with_call_ids`."""
    named: dict[str, tuple[str, str]] = {}
    changed: list[Message] = []
    num_calls = num_replies = 0
    for number, message in enumerate(messages):
        if message["role"] == "tool" and str(message.get("tool_call_id")) in named:
            id_, name = named[str(message["tool_call_id"])]
            message = {"name": name, **message, "tool_call_id": id_}
        elif message["role"] == "assistant":
            calls = []
            for position, call in enumerate(_calls_in(message, number)):
                own = format_.own_id is not None and format_.own_id.fullmatch(call.id) is not None
                id_ = call.id if own else format_.call_id(num_replies, position)
                if not own and format_.named_id is not None:
                    id_ = format_.named_id(call.name, num_calls)
                num_calls += 1
                named[call.id] = id_, call.name
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": id_, "type": "function", "function": function})
            num_replies += 1
            message = {**message, "tool_calls": calls} if calls else message
        changed.append(message)
    return changed


def _calls_in(message: Message, number: int) -> list[CallToWrite]:
    try:
        return calls_of(message)
    except RenderError as error:
        raise RenderError(f"messages[{number}].{error}") from None


def marked_texts(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Return messages whose texts end with marks, and where each mark is; replies have none.

    Names of tools are left alone: results follow their calls.
    """
    marks: dict[str, str] = {}

    def marked(text: str, place: str) -> str:
        marks[place] = f"{_MARK}{len(marks)}{_MARK}"
        return f"{text}{marks[place]}"

    changed = []
    for number, message in enumerate(messages):
        message = dict(message)
        name, content = message.get("name"), message.get("content")
        if isinstance(name, str) and name and message["role"] != "tool":
            message["name"] = marked(name, f"messages[{number}].name")
        if message["role"] != "assistant" and isinstance(content, str) and content.strip():
            message["content"] = marked(content, f"messages[{number}].content")
        elif message["role"] != "assistant" and isinstance(content, list):
            message["content"] = [
                {**part, "text": marked(part["text"], f"messages[{number}].content[{position}]")}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for position, part in enumerate(content)
            ]
        changed.append(message)
    return changed, marks


def reasoning_of(message: Message) -> str:
    """Return the thinking that a message holds in a separate field."""
    texts = (message.get(key) for key in REASONING_KEYS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _with_one_text(message: Message, key: str) -> Message:
    """Return a message with a call as rollouts in channels have it; see `Reply.message`."""
    content = _text_of(message).strip()
    reasoning = "\n\n".join(filter(None, (message[key], content)))
    return {**message, key: reasoning, "content": ""}


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING_KEYS}


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise RenderError("content: a reply consists of text, and this one holds an image")
        return "".join(part["text"] for part in content)
    return str(content or "")


def _with_system_in_question(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose first question begins with the system prompt."""
    num_system = next(
        (n for n, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    rest = list(messages[num_system:])
    if not num_system or not rest or rest[0]["role"] != "user":
        return list(messages)
    prefix = "".join(f"{_text_of(message)}\n\n" for message in messages[:num_system])
    content = rest[0].get("content")
    if isinstance(content, list):
        joined: object = [{"type": "text", "text": prefix}, *content]
    else:
        joined = prefix + str(content)
    return [{**rest[0], "content": joined}, *rest[1:]]


def _canonical(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return json.dumps(calls, sort_keys=True)


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str) else as_json(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

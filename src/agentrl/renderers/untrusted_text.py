"""Escapes untrusted text before rendering: it must not become control tokens.

An added token such as `<|im_end|>` is a boundary that only the chat template may set. The same
characters in a user's question, a tool's result or a tool's description are text. Before the
template is rendered, each such literal in untrusted text is replaced by one private-use character
(a marker) that occurs nowhere in the conversation; after rendering, markers are encoded as the
plain characters of their literal by a tokenizer that knows no added tokens. Text without such
literals passes unchanged, and thus tokenizes exactly as with the model's own template.
"""

import copy
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from tokenizers import Tokenizer

from agentrl.errors import RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.thinking import THINK, ThinkingMarks
from agentrl.schema import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
# Added tokens that an assistant itself writes. Its other control tokens end or start turns.
_ASSISTANT_TAGS = ("<tool_call>", "</tool_call>")
_FIRST_MARKER = 0xF0000
_PRIVATE_USE_RANGE = "\U000f0000-\U0010fffd"
_PRIVATE_USE = re.compile(f"[{_PRIVATE_USE_RANGE}]")
MAX_CACHED_BEGINNINGS = 32
"""Number of rendered prompts whose ids are cached."""


def _pattern(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class _Markers:
    """Private-use characters, each for one literal, none of which occurs in the conversation."""

    def __init__(self, used: set[str]) -> None:
        self._used = used
        self._next = _FIRST_MARKER
        self.literals: dict[str, str] = {}
        self._markers: dict[str, str] = {}

    def marker_for(self, literal: str) -> str:
        if literal not in self._markers:
            while chr(self._next) in self._used:
                self._next += 1
            self._markers[literal] = chr(self._next)
            self.literals[chr(self._next)] = literal
            self._next += 1
        return self._markers[literal]


Tools = Sequence[Mapping[str, Any]]
_Json = TypeVar("_Json")


@dataclass(frozen=True)
class EscapedConversation:
    """A conversation whose untrusted control literals are replaced by markers."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    literals: Mapping[str, str]
    """Marker -> its literal."""
    dangling: bool
    """A text starts or ends with a part of a literal, which a template could complete."""
    given: Sequence[Message] = ()
    """The messages before parts of them were written for the template, once they are."""

    def rendered(
        self, template: ChatTemplate, stop: int | None, *, add_generation_prompt: bool
    ) -> str:
        """Return the text that a template makes of the first `stop` messages, or of all.

        Raises:
            RenderError: the template refuses them.
        """
        return template.render(
            self.messages[:stop], self.tools, add_generation_prompt=add_generation_prompt
        )


class UntrustedTextEncoder:
    """Turns conversations into token ids without letting untrusted text make control tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokenizer_json: str,
        own_control: Iterable[str] = (),
        marks: ThinkingMarks = THINK,
    ) -> None:
        """Prepare for a tokenizer.

        Args:
            tokenizer: the model's.
            tokenizer_json: the contents of its file.
            own_control: control tokens that the model writes inside its turns.
            marks: how it marks its thinking.
        """
        self._tokenizer = tokenizer
        self._plain_tokenizer = _without_added_tokens(tokenizer_json)
        added = tokenizer.get_added_tokens_decoder()
        # Runs of spaces are added tokens in some vocabularies; they are not control tokens.
        control = {id_: token for id_, token in added.items() if token.content.strip()}
        self.control_ids = frozenset(control)
        literals = [token.content for token in control.values()]
        own = {*_ASSISTANT_TAGS, *marks.tokens, *own_control}
        self._any_control = _pattern(literals)
        self._assistant_control = _pattern(
            token.content
            for token in control.values()
            if token.special and token.content not in own
        )
        self._prefixes = {text[:k] for text in literals for k in range(1, len(text))}
        self._suffixes = {text[k:] for text in literals for k in range(1, len(text))}
        self._starts = frozenset(text[0] for text in literals)
        self._ends = frozenset(text[-1] for text in literals)
        edges = "".join(map(re.escape, sorted(self._starts | self._ends)))
        # One search clears nearly all strings, because few contain any of these.
        self._suspicious = re.compile(f"[{edges}{_PRIVATE_USE_RANGE}]")
        self._longest = max((len(text) for text in literals), default=0)
        self._plain: dict[str, list[int]] = {}
        self._beginning_ids = lru_cache(MAX_CACHED_BEGINNINGS)(self._encode_beginning)
        self._cached_tools: tuple[list[Mapping[str, Any]], tuple[str, ...]] = ([], ())
        self._anchor = next(
            (
                (token.content, id_)
                for id_, token in control.items()
                if token.special and not (token.lstrip or token.rstrip or token.single_word)
            ),
            None,
        )

    def escape(
        self, messages: Sequence[Message], tools: Tools, *, edges: bool = False
    ) -> EscapedConversation:
        """Replace the control literals in untrusted text by markers.

        Args:
            messages: in OpenAI form.
            tools: OpenAI-form schemas.
            edges: also escape parts of literals at the start or end of texts.

        Raises:
            RenderError: a message has an unknown role, or holds more than text and images.
        """
        plain = [_plain_message(message) for message in messages]
        used: set[str] = set()
        found = dangling = False
        for text, pattern in self._suspicious_texts(plain, tools):
            found = found or pattern.search(text) is not None
            dangling = dangling or bool(self._head(text) or self._tail(text))
            used.update(_PRIVATE_USE.findall(text))
        if not found and not edges:
            return EscapedConversation(plain, [dict(tool) for tool in tools], {}, dangling)
        markers = _Markers(used)

        def escape_text(text: str, pattern: re.Pattern[str]) -> str:
            text = pattern.sub(lambda match: markers.marker_for(match[0]), text)
            return self._escape_edges(text, markers) if edges else text

        return EscapedConversation(
            [
                {
                    key: _map_strings(value, partial(escape_text, pattern=pattern))
                    for key, value, pattern in self._fields(message)
                }
                for message in plain
            ],
            [
                _map_strings(dict(tool), partial(escape_text, pattern=self._any_control))
                for tool in tools
            ],
            markers.literals,
            dangling,
        )

    def count(self, text: str) -> int:
        """Return the number of control literals in a text."""
        return sum(1 for _ in self._any_control.finditer(text))

    def encode(
        self, text: str, literals: Mapping[str, str], *, after_token: bool = False
    ) -> list[int]:
        """Return the ids of rendered text.

        Args:
            text: the rendered text of an escaped conversation, or a part of it.
            literals: the conversation's markers.
            after_token: the text follows a token, so nothing is put before it (tokenizers of the
                SentencePiece family put a space before the start of a text).

        Raises:
            RenderError: untrusted text would become a control token despite escaping, or the text
                is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RenderError("a text contains a lone surrogate") from None
        pieces = re.split(f"([{''.join(literals)}])", text) if literals else [text]
        ids: list[int] = []
        num_control = 0
        for position, piece in enumerate(pieces):
            if position % 2:
                ids += self._plain_ids(literals[piece])
            elif piece:
                num_control += self.count(piece)
                ids += self._encode_piece(piece, after_token=after_token or position > 0)
        if sum(id_ in self.control_ids for id_ in ids) > num_control:
            raise RenderError("untrusted text would turn into control tokens under this tokenizer")
        return ids

    def _encode_piece(self, text: str, *, after_token: bool) -> Iterable[int]:
        if not after_token or self._anchor is None:
            return self._beginning_ids(text)
        literal, anchor_id = self._anchor
        ids: list[int] = self._tokenizer.encode(literal + text, add_special_tokens=False).ids
        assert ids[0] == anchor_id
        return ids[1:]

    def _encode_beginning(self, text: str) -> "array[int]":
        """Return the ids of a prompt's start; cached, because a group's records start alike."""
        return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _plain_ids(self, literal: str) -> list[int]:
        """Return the ids of a literal as plain characters."""
        if literal not in self._plain:
            # The pieces get ever smaller, because a vocabulary may have the literal as an ordinary
            # word.
            for size in range(len(literal), 0, -1):
                ids = [
                    id_
                    for start in range(0, len(literal), size)
                    for id_ in self._plain_tokenizer.encode(
                        literal[start : start + size], add_special_tokens=False
                    ).ids
                ]
                if not self.control_ids.intersection(ids):
                    self._plain[literal] = ids
                    break
            else:
                raise RenderError(f"the tokenizer has no plain form of {literal!r}")
        return self._plain[literal]

    def _suspicious_texts(
        self, messages: Sequence[Message], tools: Tools
    ) -> Iterator[tuple[str, re.Pattern[str]]]:
        """Yield the strings with a suspicious character, and the literals they must not contain."""
        for message in messages:
            for key, value, pattern in self._fields(message):
                for text in filter(self._suspicious.search, _strings_in([key, value])):
                    yield text, pattern
        for text in self._suspicious_texts_of_tools(list(tools)):
            yield text, self._any_control

    def _suspicious_texts_of_tools(self, tools: list[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the suspicious strings in tools; cached, because prompts rarely change the tools."""
        cached, texts = self._cached_tools
        if cached != tools:
            texts = tuple(filter(self._suspicious.search, _strings_in(tools)))
            self._cached_tools = copy.deepcopy(tools), texts
        return texts

    def _fields(self, message: Message) -> Iterator[tuple[str, Any, re.Pattern[str]]]:
        """Yield a message's fields, each with the literals it must not contain.

        An assistant's text may contain the tokens that its model writes. The values of structured
        calls are always text.
        """
        is_assistant = message["role"] == "assistant"
        for key, value in message.items():
            is_text = is_assistant and key != "tool_calls"
            yield key, value, self._assistant_control if is_text else self._any_control

    def _head(self, text: str) -> str:
        """Return the end of a literal at the start of a text, ignoring space (templates trim)."""
        text = text.lstrip()[: self._longest]
        if self._ends.isdisjoint(text):
            return ""
        return next((text[:k] for k in range(len(text), 0, -1) if text[:k] in self._suffixes), "")

    def _tail(self, text: str) -> str:
        """Return the start of a literal at the end of a text, ignoring space."""
        text = text.rstrip()[-self._longest :]
        if self._starts.isdisjoint(text):
            return ""
        return next((text[k:] for k in range(len(text)) if text[k:] in self._prefixes), "")

    def _escape_edges(self, text: str, markers: _Markers) -> str:
        if tail := self._tail(text):
            start = len(text.rstrip()) - len(tail)
            text = text[:start] + markers.marker_for(tail) + text[start + len(tail) :]
        if head := self._head(text):
            start = len(text) - len(text.lstrip())
            text = text[:start] + markers.marker_for(head) + text[start + len(head) :]
        return text


def _without_added_tokens(tokenizer_json: str) -> Tokenizer:
    """Return the same tokenizer without its added tokens."""
    definition = json.loads(tokenizer_json)
    definition["added_tokens"] = []
    # Post-processors refer to the removed special tokens; they add tokens and never split text.
    definition["post_processor"] = None
    return Tokenizer.from_str(json.dumps(definition))


def _plain_message(message: Message) -> Message:
    """Return the message as templates expect it: content as one text, arguments as objects.

    Content with images stays a list, without their addresses; other parts are joined. OpenAI's wire
    format has the arguments of a call as JSON inside a string; templates expect the object.

    Raises:
        RenderError: an unknown role, or a part that is neither text nor an image.
    """
    role = message.get("role")
    if role not in ROLES:
        raise RenderError(f"unknown message role {role!r} (known: {', '.join(ROLES)})")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [_plain_call(call) for call in message["tool_calls"]]}
    content = message.get("content")
    if content is None and role == "assistant":  # as OpenAI's clients write a reply that only calls
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    parts = [_plain_part(part) for part in content]
    if any(part["type"] == "image" for part in parts):
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}


def _plain_part(part: object) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text":
        return {"type": "text", "text": str(part["text"])}
    if kind == "image_url":
        return {"type": "image"}
    raise RenderError("only text and images can be rendered")


def _plain_call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    assert isinstance(call, dict)
    return {**call, "function": {**function, "arguments": arguments}}


def _strings_in(value: object) -> list[str]:
    """Return every string of a JSON value, keys included."""
    found: list[str] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, Mapping):
            pending += item
            pending += item.values()
    return found


def _map_strings(value: _Json, change: Callable[[str], str]) -> _Json:
    """Return a JSON value with every string in it changed, keys included."""
    changed: object = value
    if isinstance(value, str):
        changed = change(value)
    elif isinstance(value, Mapping):
        changed = {
            _map_strings(key, change): _map_strings(item, change) for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        changed = [_map_strings(item, change) for item in value]
    return cast("_Json", changed)

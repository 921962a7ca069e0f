"""Gemma 4's calls, `<|tool_call>call:NAME{key:value,...}<tool_call|>`, and FunctionGemma's.

Strings are delimited by `<|"|>` marks, which are separate tokens, so nothing inside is escaped.
"""

import re
from functools import partial
from typing import Any

from agentrl.renderers.tool_calls.call_format import (
    CallReader,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    checked,
    marked_format,
    tool_name,
)
from agentrl.renderers.tool_calls.call_writers import gemma_call, one_by_one

_HEAD = re.compile(r"\s*+call:([^\s{<]++)\s*+(?=\{)")
_KEY = re.compile(r"(?![\"'])[^\s:,{}\[\]<]++")
_NUMBER = re.compile(r"-?\d{1,100}+(?:\.\d{1,100}+)?+(?:[eE][+-]?\d{1,4}+)?+(?![\w.])")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "None": None}
_WORD = re.compile(r"\w{1,8}+")
_MAX_DEPTH = 40


def _read(
    quote: str, close: str, text: str, position: int, tools: Tools
) -> tuple[list[ParsedCall], int]:
    head = _HEAD.match(text, position)
    if head is None:
        raise FormatError("expected call:NAME{")
    name = tool_name(head[1], tools)
    reader = _GemmaReader(text, head.end(), quote)
    try:
        call = checked(name, reader.mapping(0))
        if not reader.is_next(close):
            raise reader.expected(repr(close))
    except FormatError as error:
        error.name = error.name or name
        raise
    return [call], reader.position


class _GemmaReader(CallReader):
    """Reads values."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        super().__init__(text, position)
        self._quote = quote

    def mapping(self, depth: int) -> dict[str, Any]:
        self.expect("{")
        items: dict[str, Any] = {}
        while not self.is_next("}"):
            key = self._key()
            self.expect(":")
            if key in items:
                raise FormatError(f"argument {key!r} is given twice")
            items[key] = self._value(depth + 1)
            if not self.is_next("}"):
                self.expect(",")
        self.expect("}")
        return items

    def _key(self) -> str:
        if self.is_next(self._quote):
            return self._string()
        match = _KEY.match(self.text, self.position)
        if match is None:
            raise self.expected("the name of an argument")
        self.position = match.end()
        return match[0]

    def _value(self, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise FormatError("the arguments are nested too deeply")
        if self.is_next(self._quote):
            return self._string()
        if self.is_next("{"):
            return self.mapping(depth)
        if self.is_next("["):
            return self._items(depth)
        if number := _NUMBER.match(self.text, self.position):
            self.position = number.end()
            return float(number[0]) if set(".eE") & set(number[0]) else int(number[0])
        word = _WORD.match(self.text, self.position)
        if word is None or word[0] not in _WORDS:
            raise self.expected(f"a value (text stands between {self._quote})")
        self.position = word.end()
        return _WORDS[word[0]]

    def _items(self, depth: int) -> list[object]:
        self.expect("[")
        items: list[object] = []
        while not self.is_next("]"):
            items.append(self._value(depth + 1))
            if not self.is_next("]"):
                self.expect(",")
        self.expect("]")
        return items

    def _string(self) -> str:
        self.expect(self._quote)
        end = self.text.find(self._quote, self.position)
        if end < 0:
            raise FormatError("a text has no end")
        text = self.text[self.position : end]
        self.position = end + len(self._quote)
        return text


def _format(names: str, open_: str, close: str, quote: str) -> ToolCallFormat:
    return marked_format(
        *(names, open_, close, partial(_read, quote, close)),
        one_by_one(partial(gemma_call, open_, close, quote), ""),
        control=(open_, close, quote),
    )


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format(
    "function_gemma", "<start_function_call>", "<end_function_call>", "<escape>"
)

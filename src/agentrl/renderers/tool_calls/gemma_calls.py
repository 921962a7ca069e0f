"""Gemma 4's calls: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Strings are delimited by `<|"|>` marks, which are separate tokens, so nothing inside is escaped.
"""

import re
from functools import partial
from typing import Any

from agentrl.renderers.tool_calls.call_format import (
    CallReader,
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    call_between,
    checked,
    tool_name,
)
from agentrl.renderers.tool_calls.call_writers import gemma_call, one_by_one

_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*+call:([^\s{<]++)\s*+(?=\{)")
_KEY = re.compile(r"(?![\"'])[^\s:,{}\[\]<]++")
_NUMBER = re.compile(r"-?\d{1,100}+(?:\.\d{1,100}+)?+(?:[eE][+-]?\d{1,4}+)?+(?![\w.])")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "None": None}
_WORD = re.compile(r"\w{1,8}+")
_MAX_DEPTH = 40


def scan_gemma(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find the next call."""
    return call_between(text, start, _OPEN, _CLOSE, partial(_call, text, tools))


def _call(text: str, tools: Tools, position: int) -> tuple[ParsedCall, int]:
    head = _HEAD.match(text, position)
    if head is None:
        raise FormatError(f"expected call:NAME{{ after {_OPEN}")
    name = tool_name(head[1], tools)
    reader = _GemmaReader(text, head.end())
    try:
        call = checked(name, reader.mapping(0))
        reader.expect(_CLOSE)
    except FormatError as error:
        error.name = error.name or name
        raise
    return call, reader.position


class _GemmaReader(CallReader):
    """Reads values."""

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
        if self.is_next(_QUOTE):
            return self._string()
        match = _KEY.match(self.text, self.position)
        if match is None:
            raise self.expected("the name of an argument")
        self.position = match.end()
        return match[0]

    def _value(self, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise FormatError("the arguments are nested too deeply")
        if self.is_next(_QUOTE):
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
            raise self.expected(f"a value (text stands between {_QUOTE})")
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
        self.expect(_QUOTE)
        end = self.text.find(_QUOTE, self.position)
        if end < 0:
            raise FormatError("a text has no end")
        text = self.text[self.position : end]
        self.position = end + len(_QUOTE)
        return text


GEMMA4 = ToolCallFormat(
    scan_gemma,
    control=(_OPEN, _CLOSE, _QUOTE),
    begin=lambda tool: _OPEN + "call:" + ("" if tool is None else f"{tool}{{"),
    write=one_by_one(gemma_call, ""),
    names=("gemma4",),
    example=f"{_OPEN}call:NAME{{KEY:{_QUOTE}VALUE{_QUOTE}}}{_CLOSE}",
    giveaways=(_OPEN,),
)

"""Formats that write calls as Python does: the pythonic list, LFM2, and MiniCPM's code block.

Nothing is executed, and only literals are read. Accepted beyond Python's own syntax, because models
write it: keyword arguments named like Python keywords, `-` and `.` in names, JSON's `true`, `false`
and `null`, line breaks inside strings.
"""

import ast
import re
import warnings
from collections.abc import Iterator

from agentrl.renderers.tool_calls.call_format import (
    CallReader,
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    checked,
    decode_json,
    marked_format,
    refused,
    skip_space,
)
from agentrl.renderers.tool_calls.call_objects import calls_of
from agentrl.renderers.tool_calls.call_writers import between, one_by_one, python_call

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[^\W\d][\w.-]*")
_LIST_START = re.compile(r"\[\s*[^\W\d][\w.-]*\s*\(")
_NEXT_LIST = re.compile(rf"\s*+[,;]?\s*+(?={_LIST_START.pattern})")
_OBJECT_LIST = re.compile(r"\s*+\[\s*+\{")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STRING_START = re.compile(r"[rRuU]?('''|\"\"\"|'|\")")
_FENCE = re.compile(r"\s*```(?:python|py)?[ \t]*\n?")
_WORDS: dict[str, bool | None] = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}
_MAX_DEPTH = 40
_MAX_DIGITS = 100


def scan_pythonic(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `<|python_start|>[f(a=1), g(b="x")]<|python_end|>` (Llama 4)."""
    begin = text.find(_PYTHON_START, start)
    if begin < 0:
        return None
    return _list_section(text, begin, skip_space(text, begin + len(_PYTHON_START)))


def scan_pythonic_bare(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find a reply that starts with `[f(a=1), g(b="x")]`."""
    begin = skip_space(text, start)
    return _list_section(text, begin, begin) if _LIST_START.match(text, begin) else None


def _list_section(text: str, begin: int, position: int) -> CallSection:
    reader = _Reader(text, position)
    calls: list[ParsedCall] = []
    try:
        calls += reader.call_list()
        while (following := _NEXT_LIST.match(text, reader.position)) is not None:
            reader.position = following.end()
            calls += reader.call_list()
    except FormatError as error:
        calls.append(refused(error))
        return CallSection(begin, calls, _end_of_mark(text, position, _PYTHON_END))
    end = reader.position
    if reader.is_next(_PYTHON_END):
        end = reader.position + len(_PYTHON_END)
    return CallSection(begin, calls, end)


def _read_python(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read `f(a=1)` one after another, in a list or in a fence; a list of JSON objects too."""
    if _OBJECT_LIST.match(text, position):
        value, end = decode_json(text, skip_space(text, position))
        return calls_of(value), end
    fence = _FENCE.match(text, position)
    reader = _Reader(text, fence.end() if fence else position)
    if reader.is_next("["):
        return reader.call_list(), reader.position
    calls = list(reader.calls("```" if fence else "<", dividers=",;"))
    if not calls:
        raise FormatError("expected NAME(ARGUMENT=VALUE, ...)")
    if fence:
        reader.expect("```")
    return calls, reader.position


def _end_of_mark(text: str, start: int, mark: str) -> int:
    found = text.find(mark, start)
    return found + len(mark) if found >= 0 else len(text)


class _Reader(CallReader):
    """Reads calls and literals."""

    def call_list(self) -> list[ParsedCall]:
        """Read calls between brackets."""
        self.expect("[")
        calls = list(self.calls("]", dividers=","))
        self.expect("]")
        if not calls:
            raise FormatError("the list holds no call")
        return calls

    def calls(self, end: str, *, dividers: str) -> Iterator[ParsedCall]:
        """Yield calls until `end` is next."""
        while not self.is_next(end):
            yield self._call()
            while self.text[self.position : self.position + 1] in tuple(dividers):
                self.position += 1

    def _call(self) -> ParsedCall:
        name = self._name("the name of a tool")
        self.expect("(")
        arguments: dict[str, object] = {}
        while not self.is_next(")"):
            try:
                key = self._name("NAME=VALUE")
                self.expect("=")
                if key in arguments:
                    raise FormatError(f"argument {key!r} is given twice")
                arguments[key] = self._value(0)
                if not self.is_next(")"):
                    self.expect(",")
            except FormatError as error:
                raise FormatError(str(error), name) from None
        self.expect(")")
        self.skip()
        return checked(name, arguments)

    def _name(self, expected: str) -> str:
        self.skip()
        match = _NAME.match(self.text, self.position)
        if match is None:
            raise self.expected(expected)
        self.position = match.end()
        return match[0]

    def _value(self, depth: int) -> object:
        self.skip()
        if depth > _MAX_DEPTH:
            raise FormatError("the arguments are nested too deeply")
        char = self.text[self.position : self.position + 1]
        if char in ("[", "("):
            return self._items({"[": "]", "(": ")"}[char], depth)
        if char == "{":
            return self._mapping(depth)
        if _STRING_START.match(self.text, self.position):
            return self._string()
        if number := _NUMBER.match(self.text, self.position):
            return self._number(number[0])
        word = self._name("a literal value")
        if word not in _WORDS:
            raise FormatError(f"expected a literal value, found {word!r}")
        return _WORDS[word]

    def _number(self, text: str) -> object:
        if len(text) > _MAX_DIGITS:
            raise FormatError("a number has too many digits")
        try:
            value: object = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            raise FormatError(f"{text!r} is not a number") from None
        self.position += len(text)
        return value

    def _items(self, close: str, depth: int) -> list[object]:
        self.position += 1
        items: list[object] = []
        while not self.is_next(close):
            items.append(self._value(depth + 1))
            if not self.is_next(close):
                self.expect(",")
        self.expect(close)
        return items

    def _mapping(self, depth: int) -> dict[str, object]:
        self.position += 1
        items: dict[str, object] = {}
        while not self.is_next("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise FormatError("the keys of an object are strings")
            self.expect(":")
            if key in items:
                raise FormatError(f"the key {key!r} is given twice")
            items[key] = self._value(depth + 1)
            if not self.is_next("}"):
                self.expect(",")
        self.expect("}")
        return items

    def _string(self) -> str:
        start = _STRING_START.match(self.text, self.position)
        assert start is not None
        quote, raw = start[1], self.text[self.position] in "rR"
        position = start.end()
        while not self.text.startswith(quote, position):
            if position >= len(self.text):
                raise FormatError("a string has no end")
            position += 2 if self.text[position] == "\\" else 1
        body = self.text[start.end() : position]
        self.position = position + len(quote)
        return body if raw else _unescaped(body)


_ESCAPE = re.compile(
    r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[\w -]{1,90}\}|.)", re.S
)


def _unescaped(body: str) -> str:
    return _ESCAPE.sub(_escape, body) if "\\" in body else body


def _escape(match: re.Match[str]) -> str:
    try:
        with warnings.catch_warnings():
            # As in Python, an unknown escape stands for itself; Python's warning about it is not
            # needed.
            warnings.simplefilter("ignore")
            return str(ast.literal_eval(f'"{match[0]}"'))
    except (SyntaxError, ValueError):
        return match[0]


PYTHONIC = ToolCallFormat(
    scan_pythonic,
    scan_pythonic_bare,
    control=(_PYTHON_START, _PYTHON_END),
    begin=lambda tool: "[" + ("" if tool is None else f"{tool}("),
    write=between("[", one_by_one(python_call, ", "), "]"),
    names=("pythonic",),
    example='[NAME(KEY="VALUE")]',
    giveaways=(_PYTHON_START, "[func_name1("),
)
LFM2 = marked_format(
    *("lfm2", _BEGIN, _END, _read_python),
    between(f"{_BEGIN}[", one_by_one(python_call, ", "), f"]{_END}"),
    giveaways=(f"{_BEGIN}[",),
)
MINICPM = marked_format(
    *("minicpm", _BEGIN, _END, _read_python),
    between(f"{_BEGIN}\n```python\n", one_by_one(python_call), f"\n```\n{_END}"),
)
OLMO3 = marked_format(
    *("olmo3", "<function_calls>", "</function_calls>", _read_python),
    between("<function_calls>", one_by_one(python_call), "</function_calls>"),
)

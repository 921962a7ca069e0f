"""`ToolCallFormat`: the definition of a tool-call format, and what all formats share.

The shared part decodes the values of calls and rejects malformed calls, whatever their
format.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

from agentrl.renderers.tool_calls.call_writers import CallToWrite, CallWriter
from agentrl.schema import Message

_MAX_DEPTH = 32
_WINDOW_CHARS = 4096
_LONGEST_WORD = 16
"""Upper bound on the length of a JSON word or escape sequence, which a cut may break."""
_MAX_INT = 2**63
SHOWN_CHARS = 40
"""How much of a text of the model an error shows."""
_NOT_IN_NAMES = re.compile(r"[\s{}()\[\]<>\"'`=,;]")

Tools = Sequence[Mapping[str, Any]]


class ParsedCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    format_error: str | None
    id: str = ""
    """The model's own id for the call, if its format has one."""


class CallSection(NamedTuple):
    """A part `[start, end)` of a reply that consists of tool calls."""

    start: int
    calls: list[ParsedCall]
    end: int


class SplitReply(NamedTuple):
    """A whole reply, parsed."""

    reasoning: str
    content: str
    calls: list[ParsedCall]


Scanner = Callable[[str, int, Tools], CallSection | None]
"""`(text, start, tools)`: the next section at or after `start`, or None. It never raises: a call
that cannot be parsed carries `format_error`. It takes at most linear time, because models' texts
can be repetitive, and samplers parse them.
"""


BodyReader = Callable[[str, int, Tools], tuple[list[ParsedCall], int]]
"""`(text, position, tools)`: the calls from a position on, and where they end."""


class FormatError(Exception):
    """A call cannot be parsed; the message, which the model reads, says why."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def refused(error: FormatError) -> ParsedCall:
    """Return the call that stands for one that cannot be parsed."""
    return ParsedCall(error.name if _unstorable(error.name, 0) is None else "", {}, str(error))


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a tool or argument that no schema mentions."""
    return _NOT_IN_NAMES.search(text) is None


def schemas_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Return the schema of the arguments of every tool, by the tool's name."""
    functions = (tool.get("function", tool) for tool in tools)
    found = {str(function.get("name")): function.get("parameters") for function in functions}
    return {name: s if isinstance(s, Mapping) else {} for name, s in found.items()}


def tool_name(written: str, tools: Tools) -> str:
    """Return the name of a tool that stands unquoted between marks."""
    name = written.strip()
    if not is_name(name) and name not in schemas_of(tools):
        raise FormatError(f"{name[:SHOWN_CHARS]!r} is not the name of a tool")
    return name


_SPACE = re.compile(r"\s*")


def skip_space(text: str, position: int) -> int:
    """Return the position of the first non-whitespace character from `position` on."""
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def block_end(text: str, inside: int, open_: str, close: str) -> int:
    """Return where to continue after a block that cannot be parsed."""
    # The search for the end stops at the next block, so that the text of n blocks without an end is
    # searched once instead of n times.
    next_block = text.find(open_, inside)
    limit = len(text) if next_block < 0 else next_block
    end = text.find(close, inside, limit)
    return limit if end < 0 else end + len(close)


def scan_marked(open_: str, close: str, read: BodyReader) -> Scanner:
    """Return the scanner of calls between two marks; without a second one, they end by themselves."""

    def scan(text: str, start: int, tools: Tools) -> CallSection | None:
        begin = text.find(open_, start)
        if begin < 0:
            return None
        inside = begin + len(open_)
        try:
            calls, position = read(text, inside, tools)
            position = skip_space(text, position) if close else position
            is_broken = any(call.format_error for call in calls)
            if not is_broken and not text.startswith(close, position):
                found = "more text" if position < len(text) else "the end of the message"
                name = calls[0].name if len(calls) == 1 else ""
                raise FormatError(f"expected {close} after the call, found {found}", name)
        except FormatError as error:
            calls, position, is_broken = [refused(error)], inside, True
        end = block_end(text, inside, open_, close or open_) if is_broken else position + len(close)
        return CallSection(begin, calls, end)

    return scan


class CallReader:
    """Reads the parts of calls from a position onwards; white space between them is skipped."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def skip(self) -> None:
        """Go to the next part."""
        self.position = skip_space(self.text, self.position)

    def is_next(self, mark: str) -> bool:
        """Return whether the next part is this mark."""
        self.skip()
        return self.text.startswith(mark, self.position)

    def expect(self, mark: str) -> None:
        """Read a mark."""
        if not self.is_next(mark):
            raise self.expected(repr(mark))
        self.position += len(mark)

    def expected(self, what: str) -> FormatError:
        """Return the error of a reply that goes on with something else."""
        found = self.text[self.position : self.position + 12] or "the end of the message"
        return FormatError(f"expected {what}, found {found!r}")


def _refuse_constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is not a JSON value")


class _KeyTwiceError(ValueError):
    """An object has a key twice, and one of its values would be lost."""


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _KeyTwiceError(f'the key "{twice[:SHOWN_CHARS]}" is given twice')
    return value


# `strict=False` admits raw line breaks inside strings, which models write in code arguments.
_DECODER = json.JSONDecoder(
    strict=False, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition
)


def decode_json(text: str, start: int) -> tuple[object, int]:
    """Return the JSON value at `start` and the position after it.

    The decoder counts the lines of all text before an error. It gets only as much text as the value
    needs; otherwise, a reply with n errors would be scanned n times.
    """
    size = _WINDOW_CHARS
    while True:
        window = text[start : start + size]
        value, end, reason = _try_decode(window)
        is_whole = start + size >= len(text)
        # An error near the end, or an unterminated string, may come from the cut.
        if is_whole or (reason is None and end < len(window)):
            break
        if (
            reason is not None
            and end < len(window) - _LONGEST_WORD
            and "Unterminated" not in reason
        ):
            break
        size *= 2
    if reason is not None:
        raise FormatError(f"invalid JSON: {reason}")
    return value, start + end


def _try_decode(text: str) -> tuple[object, int, str | None]:
    """Return the JSON value at the start, its end, and its error, if any."""
    try:
        return *_DECODER.raw_decode(text), None
    except json.JSONDecodeError as error:
        return None, error.pos, f"{error.msg} (character {error.pos} of the call)"
    except _KeyTwiceError as error:
        return None, 0, str(error)
    except ValueError:
        return None, 0, "a number has too many digits"
    except RecursionError:
        return None, 0, "nested too deeply"


def decode_object(text: str, start: int, preceding: str) -> tuple[dict[str, Any], int]:
    """Return the JSON object at `start`, which follows the text `preceding`."""
    if not text.startswith("{", start):
        raise FormatError(f"expected a JSON object after {preceding}")
    value, end = decode_json(text, start)
    assert isinstance(value, dict)
    return value, end


def checked(name: str, arguments: object, id_: str = "", *, key: str = "arguments") -> ParsedCall:
    """Return a call whose name and arguments can be stored and sent on."""
    if not name.strip():
        raise FormatError("the call names no tool")
    if isinstance(arguments, str) and arguments.strip():
        # Some models write the arguments as in OpenAI's wire format: JSON inside a string.
        text = arguments.strip()
        arguments, end = decode_object(text, 0, f'"{key}"')
        if end != len(text):
            raise FormatError(f'"{key}" must be one JSON object', name)
    if arguments is None or isinstance(arguments, str):
        arguments = {}  # many models write empty arguments this way
    if not isinstance(arguments, dict):
        raise FormatError(f'"{key}" must be a JSON object', name)
    problem = _unstorable([name, arguments, id_], -1)
    if problem is not None:
        raise FormatError(problem, name)
    return ParsedCall(name.strip(), arguments, None, id_)


def _unstorable(value: object, depth: int) -> str | None:
    """Return why a JSON value can be neither stored nor sent on, or None."""
    if depth > _MAX_DEPTH:
        return f"the arguments are nested more than {_MAX_DEPTH} deep"
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT:
        return "a number does not fit 64 bits"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "a number is too large"
    if isinstance(value, str) and _SURROGATE.search(value):
        return "a string holds half of a surrogate pair"
    if isinstance(value, dict):
        if any("\0" in key for key in value):
            return "an argument name holds a NUL character"
        items: list[object] = [*value, *value.values()]
    elif isinstance(value, list):
        items = value
    else:
        return None
    return next((reason for item in items if (reason := _unstorable(item, depth + 1))), None)


_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_ARGUMENT = re.compile(r'\s*\{"KEY|<\w+[= ][^>]*KEY|<arg_key>KEY|KEY')
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def _default_call_id(turn: int, position: int) -> str:
    return f"call_{turn}_{position}"


def nine_alphanumerics(turn: int, position: int) -> str:
    """Return a call id in Mistral's format, unique among all calls of a rollout."""
    return "c" + _base36(turn, 5) + _base36(position, 3)


def _base36(number: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        number, digit = divmod(number, 36)
        digits = _ALPHABET[digit] + digits
    return digits


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family of models writes its tool calls."""

    scan: Scanner | None = None
    """Finds marked calls, anywhere in the content."""
    scan_leading: Scanner | None = None
    """Finds unmarked calls, which count only at the start of the content."""
    split: Callable[[str, Tools], SplitReply] | None = None
    """Parses a whole reply if thinking and answer have their own channels, as calls do; the chat
    template joins them again. Like a scanner, it never raises and takes linear time.
    """
    call_id: Callable[[int, int], str] = _default_call_id
    """`(turn, position)`: the id for a call without one."""
    own_id: re.Pattern[str] | None = None
    """Format of the ids that the model gives its calls and its template expects back."""
    named_id: Callable[[str, int], str] | None = None
    """`(name, number in the conversation)`: the id that the model itself would give a call."""
    control: tuple[str, ...] = ()
    """Control tokens that calls consist of: the model may write them, untrusted text may not."""
    write: CallWriter | None = None
    """Writes calls; None if only the model's own chat template can."""
    preamble: str = ""
    """How a reply in channels has text before its call, with `%s` for the text; templates leave it
    out.
    """
    begin: Callable[[str | None], str] | None = None
    """Start of a call, of the named tool or of any; None if templates disagree."""
    names: tuple[str, ...] = ()
    """Its names for `--tool_call_parser`, if it is built in."""
    giveaways: tuple[str, ...] = ()
    """Texts whose presence in a chat template shows that its model uses this format."""
    example: str = ""
    """A call of the tool NAME with the argument KEY, for models to which tools are described in
    words.
    """


def with_tool_descriptions(
    messages: Sequence[Message], tools: Tools, format_: ToolCallFormat, *, as_system: bool = True
) -> list[Message]:
    """Return a conversation whose system prompt describes the tools and how to call them.

    For chat templates that do not render tools. The text is documented (docs/tools.md).
    """
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    description = "You can call these tools:\n" + "\n".join(functions)
    if format_.example:
        description += f"\n\nTo call one, write\n{format_.example}\nand end your message there."
    first = messages[0] if messages else {}
    if isinstance(first.get("content"), str):
        if first.get("role") == "system":
            return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]
        if not as_system:
            return [{**first, "content": f"{description}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def marked_format(
    names: str, open_: str, close: str, read: BodyReader, write: CallWriter, **others: Any
) -> ToolCallFormat:
    """Return the format of calls between two marks, which scanner and writer of their body define.

    Args:
        names: its names, divided by spaces.
        open_: the mark in front of calls.
        close: the mark behind them, `""` if they end by themselves.
        read: reads what is between the marks.
        write: writes all calls of a message, with the marks.
        others: further fields, also in place of those that follow from the marks.
    """
    fields: dict[str, Any] = {
        "scan": scan_marked(open_, close, read),
        "control": (open_, *((close,) if close else ())),
        "write": write,
        "begin": partial(beginning, write),
        "names": tuple(names.split()),
        "example": write([CallToWrite("NAME", {"KEY": "VALUE"})]),
        "giveaways": (open_,),
    }
    return ToolCallFormat(**(fields | others))


def beginning(write: CallWriter, tool: str | None) -> str:
    """Return the start of a call as it is written, up to its first argument or the tool's name."""
    written = write([CallToWrite("NAME", {"KEY": ""})])
    before, _, rest = written.partition("NAME")
    if tool is None:
        return before.rstrip('" ')
    return before + tool + _FIRST_ARGUMENT.split(rest)[0]

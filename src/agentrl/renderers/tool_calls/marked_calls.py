"""Formats that mark a call's parts with tags or tokens: Qwen3-Coder, GLM, Kimi K2, DeepSeek."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

from agentrl.renderers.tool_calls.call_format import (
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    block_end,
    checked,
    decode_object,
    marked_format,
    refused,
    scan_marked,
    schemas_of,
    skip_space,
    tool_name,
)
from agentrl.renderers.tool_calls.call_writers import (
    CallToWrite,
    as_json,
    between,
    coder_call,
    glm_call,
    one_by_one,
)
from agentrl.renderers.tool_calls.typed_values import ArgumentTags, Parameters

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")

_GLM_NAME = re.compile(r"\s*([^\s<][^\n<]*)")
_GLM_ARGUMENTS = ArgumentTags(
    re.compile(r"<arg_key>([^<\n]*+)</arg_key>\s*+<arg_value>"),
    "</arg_value>",
    re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))"),
    re.compile("<arg_value>"),
)

_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(
    rf"\s*+((?:functions\.)?([^\s:<]++)(?::\d++)?)\s*+{re.escape(_KIMI_ARGUMENTS)}\s*+"
)

_KIMI_TOKENS = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_END, _KIMI_ARGUMENTS)
_NAMED = re.compile(r"\s*+([^<>\n]++)>\s*+(?=\{)")
_FENCED = re.compile(r"\s*+([^\n`{<]++)\n\s*+```(?:json)?\s*+(?=\{)")


def _coder_format(names: str, open_: str, close: str, control: tuple[str, ...]) -> ToolCallFormat:
    """Return the format `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

    Values are plain text; the tool's schema determines their types.
    """
    end = rf"</function>\s*+{close}"
    # A value may contain any of these tags, but is unlikely to contain two in the order that ends it.
    tags = ArgumentTags(
        re.compile(r"<parameter=([^<>\n]*+)>\n?"),
        "</parameter>",
        re.compile(rf"\n?</parameter>\s*+(?=<parameter=|{end})"),
        re.compile(r"<parameter=[^<>\n]*+>\n|<function=[^<>\n]*+>\s*+<parameter="),
    )
    call_end = re.compile(rf"\s*+{end}")
    start_of_call = re.compile(rf"{open_}|<function=([^<>\n]*+)>")

    def read(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
        function = _FUNCTION.match(text, position)
        if function is None:
            raise FormatError(f"expected <function=NAME> after {open_}")
        name = tool_name(function[1], tools)
        arguments, position = Parameters(name, tools).read(text, function.end(), tags, {})
        if call_end.match(text, position) is None:
            raise FormatError(f"expected a parameter or </function> and {close}", name)
        return [checked(name, arguments)], position + len("</function>")

    inside = scan_marked(open_, close, read)

    def scan(text: str, start: int, tools: Tools) -> CallSection | None:
        known = schemas_of(tools)
        for found in start_of_call.finditer(text, start):
            if found[0] == open_:
                return inside(text, found.start(), tools)
            if found[1].strip() in known:
                error = FormatError(f"expected {open_} in front of {found[0]}", found[1].strip())
                after = block_end(text, found.end(), open_, close)
                return CallSection(found.start(), [refused(error)], after)
        return None

    return marked_format(
        *(names, open_, close, read, one_by_one(partial(coder_call, open_, close))),
        scan=scan,
        control=control,
        giveaways=control[:1] or ("<function=",),
    )


def _read_glm(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    r"""Read `f\n<arg_key>p</arg_key>\n<arg_value>value</arg_value>`.

    Values are plain text; the tool's schema determines their types.
    """
    head = _GLM_NAME.match(text, position)
    if head is None:
        raise FormatError(f"expected the tool's name after {_OPEN}")
    name = tool_name(head[1], tools)
    arguments, position = Parameters(name, tools).read(text, head.end(), _GLM_ARGUMENTS, {})
    if not text.startswith(_CLOSE, position):
        raise FormatError(f"expected <arg_key> or {_CLOSE}", name)
    return [checked(name, arguments)], position


def scan_kimi_k2(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    section = (_KIMI_SECTION, _KIMI_SECTION_END)
    return _scan_calls(text, start, section, _KIMI_CALL, partial(_kimi_call, tools))


def _kimi_call(tools: Tools, text: str, position: int) -> tuple[ParsedCall, int]:
    head = _KIMI_HEAD.match(text, position)
    if head is None:
        raise FormatError(f"expected functions.NAME:NUMBER and {_KIMI_ARGUMENTS}")
    name = tool_name(head[2], tools)
    try:
        arguments, end = decode_object(text, head.end(), _KIMI_ARGUMENTS)
        return checked(name, arguments, head[1]), _skip_close(text, end, _KIMI_END)
    except FormatError as error:
        raise FormatError(str(error), name) from None


def _fenced_format(
    names: str, section: tuple[str, str], call: tuple[str, str], separator: str, giveaway: str
) -> ToolCallFormat:
    """Return DeepSeek's format: V3 and R1 fence the arguments, V3.1 does not."""
    head = re.compile(rf"([^<\n]{{1,256}}){re.escape(separator)}")

    def read(tools: Tools, text: str, position: int) -> tuple[ParsedCall, int]:
        found = head.match(text, position)
        if found is None:
            raise FormatError(f"expected NAME{separator}")
        name, position = found[1].strip(), found.end()
        fence = _FENCED.match(text, position) if name == "function" else None
        name = tool_name(name if fence is None else fence[1], tools)
        try:
            if fence is None:
                arguments, end = decode_object(text, skip_space(text, position), separator)
            else:
                arguments, end = decode_object(text, fence.end(), "the fence")
                end = _skip_close(text, end, "```")
            return checked(name, arguments), _skip_close(text, end, call[1])
        except FormatError as error:
            raise FormatError(str(error), name) from None

    def scan(text: str, start: int, tools: Tools) -> CallSection | None:
        return _scan_calls(text, start, section, call[0], partial(read, tools))

    def written(one: CallToWrite) -> str:
        return f"{call[0]}{one.name}{separator}{as_json(one.arguments)}{call[1]}"

    write = between(section[0], one_by_one(written, ""), section[1])
    return ToolCallFormat(
        scan,
        control=(*section, *call, separator),
        write=write,
        names=tuple(names.split()),
        example=write([CallToWrite("NAME", {"KEY": "VALUE"})]),
        giveaways=(giveaway,),
    )


def _skip_close(text: str, position: int, close: str) -> int:
    position = skip_space(text, position)
    if not text.startswith(close, position):
        raise FormatError(f"expected {close} after the arguments")
    return position + len(close)


def _scan_calls(
    text: str,
    start: int,
    section: tuple[str, str],
    open_: str,
    read: Callable[[str, int], tuple[ParsedCall, int]],
) -> CallSection | None:
    """Read the calls of a section, whose begin and end marks may be missing."""
    found = _first_of((section[0], open_)).search(text, start)
    if found is None:
        return None
    begin = position = found.start()
    if text.startswith(section[0], begin):
        position = skip_space(text, begin + len(section[0]))
    calls: list[ParsedCall] = []
    while text.startswith(open_, position):
        inside = position + len(open_)
        try:
            call, position = read(text, inside)
        except FormatError as error:
            call = refused(error)
            following = _first_of((open_, section[1])).search(text, inside)
            position = len(text) if following is None else following.start()
        calls.append(call)
        position = skip_space(text, position)
    if not calls:
        calls.append(refused(FormatError(f"expected {open_} after {section[0]}")))
    end = position
    if text.startswith(section[1], position):
        end = position + len(section[1])
    return CallSection(begin, calls, end)


def _write_kimi_k2(calls: Sequence[CallToWrite]) -> str:
    written = (
        f"{_KIMI_CALL}functions.{call.name}:{number}{_KIMI_ARGUMENTS}{as_json(call.arguments)}"
        f"{_KIMI_END}"
        for number, call in enumerate(calls)
    )
    return _KIMI_SECTION + "".join(written) + _KIMI_SECTION_END


@cache
def _first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    # One search for all marks: a separate search would run to the end of the text for a missing
    # one.
    return re.compile("|".join(map(re.escape, marks)))


def _read_named(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    head = _NAMED.match(text, position)
    if head is None:
        raise FormatError("expected NAME>{")
    name = tool_name(head[1], tools)
    arguments, end = decode_object(text, head.end(), "the tool's name")
    return [checked(name, arguments)], end


FUNCTIONARY = marked_format(
    *("functionary", "<function=", "</function>", _read_named),
    one_by_one(lambda call: f"<function={call.name}>{as_json(call.arguments)}</function>"),
    control=(),
    giveaways=(),
)
_SEED_OPEN, _SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
QWEN3_CODER = _coder_format("qwen3_coder", _OPEN, _CLOSE, ())
SEED_OSS = _coder_format("seed_oss", _SEED_OPEN, _SEED_CLOSE, (_SEED_OPEN, _SEED_CLOSE))
GLM = marked_format(
    *("glm45", _OPEN, _CLOSE, _read_glm, one_by_one(glm_call)),
    control=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    giveaways=("<arg_key>",),
)
KIMI_K2 = ToolCallFormat(
    scan_kimi_k2,
    own_id=re.compile(r"functions\.[\w.-]{1,128}:\d{1,9}"),
    named_id=lambda name, number: f"functions.{name}:{number}",
    control=_KIMI_TOKENS,
    write=_write_kimi_k2,
    names=("kimi_k2",),
    example=f'{_KIMI_SECTION}{_KIMI_CALL}functions.NAME:0{_KIMI_ARGUMENTS}{{"KEY": "VALUE"}}'
    f"{_KIMI_END}{_KIMI_SECTION_END}",
    giveaways=(_KIMI_SECTION,),
)
DEEPSEEK = _fenced_format(
    "deepseekv3 deepseekv31",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    giveaway="<｜tool▁calls▁begin｜>",  # noqa: RUF001
)
HUNYUAN = _fenced_format(
    *("hunyuan", ("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>"), "<tool_sep>"),
    giveaway="<tool_sep>",
)

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
    call_between,
    checked,
    decode_object,
    refused,
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
_FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")
_CODER_ARGUMENTS = ArgumentTags(
    re.compile(r"<parameter=([^<>\n]*+)>\n?"),
    "</parameter>",
    # A value may contain any of these tags, but is unlikely to contain two in the order that ends
    # it.
    re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>\s*+</tool_call>)"),
    re.compile(r"<parameter=[^<>\n]*+>\n|<function=[^<>\n]*+>\s*+<parameter="),
)

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

_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
_DEEPSEEK_SECTION_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
_DEEPSEEK_HEAD = re.compile(rf"([^<\n]{{1,256}}){re.escape(_DEEPSEEK_SEPARATOR)}")
_KIMI_TOKENS = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_END, _KIMI_ARGUMENTS)
_DEEPSEEK_TOKENS = (
    *(_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END),
    *(_DEEPSEEK_CALL, _DEEPSEEK_END, _DEEPSEEK_SEPARATOR),
)
_FENCED = re.compile(r"\s*+([^\n`{<]++)\n\s*+```(?:json)?\s*+(?=\{)")


def scan_qwen3_coder(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

    Values are plain text; the tool's schema determines their types.
    """
    read = partial(_xml_call, text, tools)
    return call_between(text, start, _OPEN, _CLOSE, read)


def _xml_call(text: str, tools: Tools, position: int) -> tuple[ParsedCall, int]:
    function = _FUNCTION.match(text, position)
    if function is None:
        raise FormatError(f"expected <function=NAME> after {_OPEN}")
    name = tool_name(function[1], tools)
    arguments, position = Parameters(name, tools).read(text, function.end(), _CODER_ARGUMENTS, {})
    end = _FUNCTION_END.match(text, position)
    if end is None:
        raise FormatError(f"expected a parameter or </function> and {_CLOSE}", name)
    return checked(name, arguments), end.end()


def scan_glm(text: str, start: int, tools: Tools) -> CallSection | None:
    r"""Find `<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>value</arg_value></tool_call>`.

    Values are plain text; the tool's schema determines their types.
    """
    read = partial(_glm_call, text, tools)
    return call_between(text, start, _OPEN, _CLOSE, read)


def _glm_call(text: str, tools: Tools, position: int) -> tuple[ParsedCall, int]:
    head = _GLM_NAME.match(text, position)
    if head is None:
        raise FormatError(f"expected the tool's name after {_OPEN}")
    name = tool_name(head[1], tools)
    arguments, position = Parameters(name, tools).read(text, head.end(), _GLM_ARGUMENTS, {})
    if not text.startswith(_CLOSE, position):
        raise FormatError(f"expected <arg_key> or {_CLOSE}", name)
    return checked(name, arguments), position + len(_CLOSE)


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


def scan_deepseek(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find DeepSeek's calls: V3 and R1 fence the arguments, V3.1 does not."""
    section = (_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END)
    return _scan_calls(text, start, section, _DEEPSEEK_CALL, partial(_deepseek_call, tools))


def _deepseek_call(tools: Tools, text: str, position: int) -> tuple[ParsedCall, int]:
    head = _DEEPSEEK_HEAD.match(text, position)
    if head is None:
        raise FormatError(f"expected NAME{_DEEPSEEK_SEPARATOR}")
    name, position = head[1].strip(), head.end()
    fence = _FENCED.match(text, position) if name == "function" else None
    name = tool_name(name if fence is None else fence[1], tools)
    try:
        if fence is None:
            arguments, end = decode_object(text, skip_space(text, position), _DEEPSEEK_SEPARATOR)
        else:
            arguments, end = decode_object(text, fence.end(), "the fence")
            end = _skip_close(text, end, "```")
        return checked(name, arguments), _skip_close(text, end, _DEEPSEEK_END)
    except FormatError as error:
        raise FormatError(str(error), name) from None


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


def _write_deepseek(call: CallToWrite) -> str:
    arguments = as_json(call.arguments)
    return f"{_DEEPSEEK_CALL}{call.name}{_DEEPSEEK_SEPARATOR}{arguments}{_DEEPSEEK_END}"


@cache
def _first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    # One search for all marks: a separate search would run to the end of the text for a missing
    # one.
    return re.compile("|".join(map(re.escape, marks)))


QWEN3_CODER = ToolCallFormat(
    scan_qwen3_coder,
    begin=lambda tool: "<tool_call>\n<function=" + ("" if tool is None else f"{tool}>\n"),
    write=one_by_one(coder_call),
    names=("qwen3_coder",),
    example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    giveaways=("<function=",),
)
GLM = ToolCallFormat(
    scan_glm,
    control=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    begin=lambda tool: "<tool_call>" + ("" if tool is None else f"{tool}\n"),
    write=one_by_one(glm_call),
    names=("glm45",),
    example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
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
DEEPSEEK = ToolCallFormat(
    scan_deepseek,
    control=_DEEPSEEK_TOKENS,
    write=between(_DEEPSEEK_SECTION, one_by_one(_write_deepseek, ""), _DEEPSEEK_SECTION_END),
    names=("deepseekv3", "deepseekv31"),
    example=f'{_DEEPSEEK_SECTION}{_DEEPSEEK_CALL}NAME{_DEEPSEEK_SEPARATOR}{{"KEY": "VALUE"}}'
    f"{_DEEPSEEK_END}{_DEEPSEEK_SECTION_END}",
    giveaways=(_DEEPSEEK_SECTION,),
)

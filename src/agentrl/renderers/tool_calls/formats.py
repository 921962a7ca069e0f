"""The formats in which models write tool calls, by name or as a chat template gives them away."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from agentrl.errors import ConfigError
from agentrl.renderers.tool_calls.call_values import Scanner
from agentrl.renderers.tool_calls.json_calls import (
    scan_hermes,
    scan_llama3,
    scan_llama3_bare,
    scan_mistral,
    scan_openai,
)
from agentrl.renderers.tool_calls.marked_calls import (
    DEEPSEEK_TOKENS,
    KIMI_TOKENS,
    scan_deepseek,
    scan_glm,
    scan_kimi_k2,
    scan_qwen3_coder,
)
from agentrl.renderers.tool_calls.python_calls import (
    scan_minicpm,
    scan_pythonic,
    scan_pythonic_bare,
)

AUTO = "auto"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def _numbered(turn: int, position: int) -> str:
    return f"call_{turn}_{position}"


def nine_alphanumerics(turn: int, position: int) -> str:
    """Return a call id in Mistral's form, which differs between all calls of a rollout."""
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
    """Finds calls that are marked as such, anywhere in what is said."""
    scan_leading: Scanner | None = None
    """Finds calls that bear no mark and so only count as the beginning of what is said."""
    call_id: Callable[[int, int], str] = _numbered
    """`(turn, position)`: the id of a call that the model gave none."""
    own_id: re.Pattern[str] | None = None
    """Form of the ids that the model itself gives its calls and its template wants back."""
    control: tuple[str, ...] = ()
    """Control tokens of which calls are made: the model may write them, text from outside not."""
    begin: Callable[[str | None], str] | None = None
    """How a call begins, of the tool of that name or of any; None where templates disagree."""


def _json_call(before: str, arguments: str) -> Callable[[str | None], str]:
    """Return how calls begin that are objects with the name first."""

    def begin(tool: str | None) -> str:
        named = "" if tool is None else f' {json.dumps(tool, ensure_ascii=False)}, "{arguments}":'
        return f'{before}{{"name":{named}'

    return begin


_HERMES = ToolCallFormat(scan_hermes, begin=_json_call("<tool_call>\n", "arguments"))
_QWEN3_CODER = ToolCallFormat(
    scan_qwen3_coder,
    begin=lambda tool: "<tool_call>\n<function=" + ("" if tool is None else f"{tool}>\n"),
)
_GLM = ToolCallFormat(
    scan_glm,
    control=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    begin=lambda tool: "<tool_call>" + ("" if tool is None else f"{tool}\n"),
)
_LLAMA3 = ToolCallFormat(
    scan_llama3,
    scan_llama3_bare,
    control=("<|python_tag|>",),
    begin=_json_call("", "parameters"),
)
_MISTRAL = ToolCallFormat(
    scan_mistral,
    call_id=nine_alphanumerics,
    own_id=re.compile("[A-Za-z0-9]{9}"),
    control=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
_KIMI_K2 = ToolCallFormat(
    scan_kimi_k2, own_id=re.compile(r"functions\.[\w.-]{1,128}:\d{1,9}"), control=KIMI_TOKENS
)
_PYTHONIC = ToolCallFormat(
    scan_pythonic,
    scan_pythonic_bare,
    control=("<|python_start|>", "<|python_end|>"),
    begin=lambda tool: "[" + ("" if tool is None else f"{tool}("),
)
_DEEPSEEK = ToolCallFormat(scan_deepseek, control=DEEPSEEK_TOKENS)
_MINICPM = ToolCallFormat(scan_minicpm, control=("<|tool_call_start|>", "<|tool_call_end|>"))
_OPENAI = ToolCallFormat(scan_leading=scan_openai, own_id=re.compile(r"[\w.:-]{1,128}"))

_FORMATS: dict[str, ToolCallFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "glm45": _GLM,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "kimi_k2": _KIMI_K2,
    "pythonic": _PYTHONIC,
    "deepseekv3": _DEEPSEEK,
    "deepseekv31": _DEEPSEEK,
    "minicpm": _MINICPM,
    "openai": _OPENAI,
}

# What a chat template shows its model of the format. The first that it holds decides: templates
# name the marks of other formats only as text.
_GIVEAWAYS = (
    ("<｜tool▁calls▁begin｜>", "deepseekv3"),  # noqa: RUF001
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "minicpm"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary', "llama3"),
)


def register_tool_call_format(name: str, format_: ToolCallFormat) -> None:
    """Make a format known under `name`, for `--tool_call_parser`.

    Raises:
        ConfigError: the name is taken by another format.
    """
    if name == AUTO or _FORMATS.setdefault(name, format_) is not format_:
        raise ConfigError(f"tool-call parser {name!r} is already registered")


def get_tool_call_format(name: str, chat_template: str = "") -> ToolCallFormat:
    """Return the format of that name; `auto` is the one that the chat template shows.

    A template that shows none is taken for one of the Hermes family, the most common.

    Raises:
        ConfigError: no format has that name; the known ones are listed.
    """
    if name == AUTO:
        name = next((format_ for mark, format_ in _GIVEAWAYS if mark in chat_template), "hermes")
    if name in _FORMATS:
        return _FORMATS[name]
    near = get_close_matches(name, [AUTO, *_FORMATS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted([AUTO, *_FORMATS]))
    raise ConfigError(f"unknown tool-call parser {name!r}{hint} (known: {known})")

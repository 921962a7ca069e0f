"""The formats in which models write tool calls, by name or as detected in a chat template.

To add a format, define its `ToolCallFormat` in a module and add a line here.
"""

from collections.abc import Collection
from difflib import get_close_matches
from functools import partial

from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.renderers.tool_calls.call_format import ToolCallFormat, marked_format
from agentrl.renderers.tool_calls.call_writers import between, object_list
from agentrl.renderers.tool_calls.gemma_calls import FUNCTION_GEMMA, GEMMA4
from agentrl.renderers.tool_calls.harmony import HARMONY
from agentrl.renderers.tool_calls.invoke_calls import DEEPSEEK_V4, DEEPSEEK_V32, MINIMAX_M2
from agentrl.renderers.tool_calls.json_calls import HERMES, LLAMA3, MISTRAL, OPENAI, read_list
from agentrl.renderers.tool_calls.marked_calls import (
    DEEPSEEK,
    FUNCTIONARY,
    GLM,
    HUNYUAN,
    KIMI_K2,
    QWEN3_CODER,
    SEED_OSS,
)
from agentrl.renderers.tool_calls.python_calls import LFM2, MINICPM, OLMO3, PYTHONIC

AUTO = "auto"
# Families whose calls are JSON objects or an array of them between two marks.
_OBJECTS = tuple(
    marked_format(
        *(names, open_, close, read_list),
        between(open_, partial(object_list, *keys), close),
        control=() if "`" in close else tuple(filter(None, (open_, close))),
    )
    for names, open_, close, keys in (
        ("phi4_mini", "<|tool_call|>", "<|/tool_call|>", ("name", "arguments")),
        ("granite", "<|tool_call|>", "", ("name", "arguments")),
        ("jamba apriel", "<tool_calls>", "</tool_calls>", ("name", "arguments")),
        ("nemotron", "<TOOLCALL>", "</TOOLCALL>", ("name", "arguments")),
        ("internlm2", "<|action_start|><|plugin|>", "<|action_end|>", ("name", "parameters")),
        ("longcat", "<longcat_tool_call>", "</longcat_tool_call>", ("name", "arguments")),
        ("cohere", "<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters")),
        ("command_r", "Action: ```json", "```", ("tool_name", "parameters")),
    )
)
# The first format whose giveaway a chat template contains is chosen: templates mention the marks of
# formats further down only as text.
_BUILT_IN = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK,
    HUNYUAN,
    MINIMAX_M2,
    GEMMA4,
    FUNCTION_GEMMA,
    KIMI_K2,
    MISTRAL,
    LFM2,
    MINICPM,
    OLMO3,
    *_OBJECTS,
    SEED_OSS,
    QWEN3_CODER,
    FUNCTIONARY,
    GLM,
    HERMES,
    PYTHONIC,
    LLAMA3,
    OPENAI,
)
_FORMATS = {name: format_ for format_ in _BUILT_IN for name in format_.names}


def register_tool_call_format(name: str, format_: ToolCallFormat) -> None:
    """Register a format under `name`, for `--tool_call_parser`.

    Raises:
        ConfigError: the name is taken by another format.
    """
    if name == AUTO or _FORMATS.setdefault(name, format_) is not format_:
        raise ConfigError(f"tool-call parser {name!r} is already registered")


def all_tool_call_formats() -> tuple[ToolCallFormat, ...]:
    """Return every known format once, the most common one first."""
    return tuple(dict.fromkeys((HERMES, *_BUILT_IN, *_FORMATS.values())))


def tool_call_formats(
    name: str, chat_template: str = "", tokens: Collection[str] = ()
) -> tuple[ToolCallFormat, ...]:
    """Return the format of that name; for `auto`, all, those first that the chat template shows.

    Those follow whose calls consist of tokens that the model has, then Hermes, the most common.
    """
    if name != AUTO:
        return (_named(name),)
    shown = (known for known in _BUILT_IN if any(mark in chat_template for mark in known.giveaways))
    by_token = (known for known in _BUILT_IN if known.control and {*known.control} <= {*tokens})
    return tuple(dict.fromkeys((*shown, *by_token, *all_tool_call_formats())))


def get_tool_call_format(
    name: str, chat_template: str = "", tokens: Collection[str] = ()
) -> ToolCallFormat:
    """Return the likeliest format; see `tool_call_formats`."""
    return tool_call_formats(name, chat_template, tokens)[0]


def _named(name: str) -> ToolCallFormat:
    if name in _FORMATS:
        return _FORMATS[name]
    added: ToolCallFormat | None = loaded_hook("tool_call_formats", name)
    if added is not None:
        return added
    names = [AUTO, *_FORMATS, *hooks("tool_call_formats")]
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(names))
    raise ConfigError(f"unknown tool-call parser {name!r}{hint} (known: {known})")

"""The formats in which models write tool calls, by name or as detected in a chat template.

To add a format, define its `ToolCallFormat` in a module and add a line here.
"""

from collections.abc import Collection
from difflib import get_close_matches

from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.renderers.tool_calls.gemma_calls import GEMMA4
from agentrl.renderers.tool_calls.harmony import HARMONY
from agentrl.renderers.tool_calls.invoke_calls import DEEPSEEK_V4, DEEPSEEK_V32, MINIMAX_M2
from agentrl.renderers.tool_calls.json_calls import HERMES, LLAMA3, MISTRAL, OPENAI
from agentrl.renderers.tool_calls.marked_calls import DEEPSEEK, GLM, KIMI_K2, QWEN3_CODER
from agentrl.renderers.tool_calls.python_calls import LFM2, MINICPM, PYTHONIC

AUTO = "auto"
# The first format whose giveaway a chat template contains is chosen: templates mention the marks of
# formats further down only as text.
_BUILT_IN = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK,
    MINIMAX_M2,
    GEMMA4,
    KIMI_K2,
    MISTRAL,
    LFM2,
    MINICPM,
    QWEN3_CODER,
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


def get_tool_call_format(
    name: str, chat_template: str = "", tokens: Collection[str] = ()
) -> ToolCallFormat:
    """Return the format of that name; `auto` is the one that the chat template shows.

    If a template shows none, the tokens that calls consist of decide; without any, the Hermes
    format is assumed, which is the most common.
    """
    if name == AUTO:
        by_template = (
            known for known in _BUILT_IN if any(mark in chat_template for mark in known.giveaways)
        )
        by_token = (known for known in _BUILT_IN if known.control and {*known.control} <= {*tokens})
        return next(by_template, next(by_token, HERMES))
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

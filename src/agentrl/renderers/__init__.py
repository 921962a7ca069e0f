"""Messages to tokens and back."""

from typing import TYPE_CHECKING, Any

from agentrl.renderers.reply import Reply
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.renderers.tool_calls.call_format_registry import register_tool_call_format

if TYPE_CHECKING:
    from agentrl.renderers.incremental import PromptIncrement
    from agentrl.renderers.renderer import Renderer

__all__ = ["PromptIncrement", "Renderer", "Reply", "ToolCallFormat", "register_tool_call_format"]


def __getattr__(name: str) -> Any:
    """Import what needs tokenizers when it is asked for: scorers run without."""
    if name in ("PromptIncrement", "Renderer"):
        from agentrl.renderers import renderer  # noqa: PLC0415

        return getattr(renderer, name)
    raise AttributeError(f"module 'agentrl.renderers' has no attribute {name!r}")

"""Messages to tokens and back."""

from agentrl.renderers.incremental import PromptIncrement
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.reply import Reply
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.renderers.tool_calls.call_format_registry import register_tool_call_format

__all__ = ["PromptIncrement", "Renderer", "Reply", "ToolCallFormat", "register_tool_call_format"]

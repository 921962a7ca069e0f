"""Messages to tokens and back."""

from agentrl.renderers.renderer import Bridge, Renderer
from agentrl.renderers.reply import Reply
from agentrl.renderers.tool_calls.formats import ToolCallFormat, register_tool_call_format

__all__ = ["Bridge", "Renderer", "Reply", "ToolCallFormat", "register_tool_call_format"]

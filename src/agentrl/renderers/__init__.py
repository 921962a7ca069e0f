"""Messages to tokens and back."""

from agentrl.renderers.renderer import Bridge, Renderer
from agentrl.renderers.reply import Reply
from agentrl.renderers.tool_calls import register_tool_call_parser

__all__ = ["Bridge", "Renderer", "Reply", "register_tool_call_parser"]

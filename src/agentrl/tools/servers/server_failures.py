"""The wording of tool servers' failures."""

from mcp import MCPError

from agentrl.errors import ToolError
from agentrl.runtime.printable import printable

_MAX_CHARS = 500


def describe(error: BaseException) -> str:
    """Describe an error in one short line, looking into exception groups.

    Error texts come from servers, so they are truncated and made printable.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error)[: 2 * _MAX_CHARS].split())[:_MAX_CHARS]
    text = printable(text)
    if isinstance(error, MCPError | ToolError) and text:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "timed out"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""Limits of what tool servers may send: messages, listings of tools, and texts of errors."""

import json
import re
from collections.abc import Sequence
from typing import Final

from mcp import MCPError
from mcp.types import Tool

from agentrl.errors import ToolError
from agentrl.runtime.printable import printable

FAILURE_KEY: Final = "agentrl_failure"
"""Key in the `data` of a JSON-RPC error for the kind of failure; see `http_transport.Failure`."""
MAX_MESSAGE_BYTES: Final = 32 * 2**20
"""Longest message that is accepted from a server."""
MAX_TOOLS: Final = 2_000
STATUS_NOT_SENT: Final = (429, 503)
"""Statuses with which a server or proxy reports that it did not process the request."""
STATUS_LOST: Final = (500, 502, 504)

_MAX_ERROR_CHARS = 500
_MAX_DESCRIPTION_CHARS = 50_000
_MAX_SCHEMA_CHARS = 500_000
# No whitespace or control characters: names appear in prompts, logs and terminals.
_NAME = re.compile(r"[\w./:@+-]{1,128}")


def listing_problem(tools: Sequence[Tool]) -> str | None:
    """Return why tools cannot be offered, or None."""
    if len(tools) > MAX_TOOLS:
        return f"lists more than {MAX_TOOLS} tools"
    for tool in tools:
        if _NAME.fullmatch(tool.name) is None:
            return (
                f"lists a tool named {tool.name[:80]!r}: names have 1 to 128 letters, digits and "
                "_ . - / : @ +"
            )
        if len(tool.description or "") > _MAX_DESCRIPTION_CHARS:
            return f"describes {tool.name!r} in more than {_MAX_DESCRIPTION_CHARS} characters"
        if len(json.dumps(tool.input_schema)) > _MAX_SCHEMA_CHARS:
            return f"has a schema of {tool.name!r} of more than {_MAX_SCHEMA_CHARS} characters"
    return None


def describe(error: BaseException) -> str:
    """Describe an error in one short line, looking into exception groups.

    Error texts come from servers, so they are truncated and made printable.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error)[: 2 * _MAX_ERROR_CHARS].split())[:_MAX_ERROR_CHARS]
    text = printable(text)
    if isinstance(error, MCPError | ToolError) and text:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "timed out"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

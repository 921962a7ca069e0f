"""Limits of what tool servers may send: size of messages, number, names and size of tools."""

import json
import re
from collections.abc import Sequence
from typing import Final

from mcp.types import Tool

FAILURE_KEY: Final = "agentrl_failure"
"""Key in the `data` of a JSON-RPC error for the kind of failure; see `http_transport.Failure`."""
MAX_MESSAGE_BYTES: Final = 32 * 2**20
"""Longest message that is accepted from a server."""
MAX_TOOLS: Final = 2_000

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

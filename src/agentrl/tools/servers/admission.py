"""Limits of what tool servers may send: number and depth of values, number and names of tools.

Input: parsed messages and tool listings. Output: the one-line reason for refusing one, or None. The
SDK needs some forty microseconds per value of a result and blocks the event loop meanwhile, so
every transport checks here first.
"""

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

_MAX_VALUES = 50_000
_MAX_DEPTH = 64
_MAX_DESCRIPTION_CHARS = 50_000
_MAX_SCHEMA_CHARS = 500_000
# No whitespace or control characters: names appear in prompts, logs and terminals.
_NAME = re.compile(r"[\w./:@+-]{1,128}")


def excess(value: object) -> str | None:
    """Return why a JSON value exceeds the limits of a message, or None.

    Counting stops at the limit.
    """
    level: list[object] = [value]
    num_values = 0
    for _ in range(_MAX_DEPTH):
        next_level: list[object] = []
        for item in level:
            if isinstance(item, dict | list):
                num_values += len(item)
                if num_values > _MAX_VALUES:
                    return f"the response contains more than {_MAX_VALUES} values"
                next_level.extend(item.values() if isinstance(item, dict) else item)
        if not next_level:
            return None
        level = next_level
    return f"the response is nested deeper than {_MAX_DEPTH} levels"


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

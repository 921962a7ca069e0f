"""Waits for the user's tool server to respond, or says in one line why it does not.

A server that ends before it has responded is not restarted: it would end again for the same reason.
"""

import asyncio
import os
import re
import time
from collections.abc import Collection

from agentrl.errors import AgentRLError, ConfigError, ToolError
from agentrl.launcher.cluster.recovery import last_error
from agentrl.runtime.processes.child_processes import Child
from agentrl.runtime.processes.restarts import ending
from agentrl.runtime.processes.wall import wall_hint
from agentrl.tools import ToolsConfig, ToolSpec, probe

START_SECONDS = 30.0
_POLL_SECONDS = 0.1
_UNSET_VARIABLE = re.compile(r"KeyError: '(\w+)'")


async def wait_for_tools(
    tools: ToolsConfig, child: Child, address: str, passed: Collection[str]
) -> tuple[ToolSpec, ...]:
    """Return the tools of a newly started server, once it responds."""
    has_responded = False
    child.may_restart = lambda _child, _status: has_responded
    deadline = time.monotonic() + START_SECONDS
    while True:
        status = child.process.returncode if child.process is not None else None
        try:
            specs = await probe(tools)
        except ConfigError as error:
            if not isinstance(error.__cause__, ToolError):
                raise
            if status is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            raise AgentRLError(_why_not_started(child, status, address, passed)) from None
        has_responded = True
        return specs


def _why_not_started(
    child: Child, status: int | None, address: str, passed: Collection[str]
) -> str:
    happened = f"it {ending(status)}" if status is not None else f"it serves no MCP at {address}"
    reason = last_error(child)
    quoted = f"its log {child.log_path} ends with: {reason}" if reason else "it printed nothing"
    hint = _variable_hint(reason, passed) or wall_hint(reason)
    return f"the tool server did not start: {happened}{hint}; {quoted}"


def _variable_hint(reason: str, passed: Collection[str]) -> str:
    """Return how to pass a variable of this process that the server seems to need."""
    unset = _UNSET_VARIABLE.fullmatch(reason)
    name = "PYTHONPATH" if reason.startswith("ModuleNotFoundError") else unset[1] if unset else ""
    if name not in os.environ or name in passed:
        return ""
    names = ",".join((*passed, name))
    return f"; it does not inherit {name}: if it needs it, give --tool_server_env {names}"

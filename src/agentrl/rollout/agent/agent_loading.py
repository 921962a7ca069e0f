"""Loads agents: what an agent function is, and how `--agent` names one."""

import inspect
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import TypeGuard

from agentrl.config.user_code import check_agent_function, load_user_module
from agentrl.errors import ConfigError, UserCodeError
from agentrl.schema import AgentResult, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

ENTRY_POINTS = "agentrl.agents"
IS_ELSEWHERE = "is_elsewhere"
"""Attribute of agents that run in another process; the function called here only waits for that
process.
"""

Returned = AgentResult | str | None
AgentFunction = Callable[[MCPTask, AgentEndpoint], Awaitable[Returned] | Returned]
"""Works on a task by calling the model at the endpoint, and returns the answer, or an
`AgentResult`. A plain function runs in its own thread. None or an empty string means no answer.
"""


def load_agent(name: str) -> AgentFunction:
    """Return the agent with this name."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(":") or attribute.endswith(")"):
        plain = f"{source.rstrip(':')}:{attribute.partition('(')[0]}"
        raise ConfigError(f"--agent {name}: use {plain} (file and function)")
    if not source:
        agent = _entry_point(name)
    else:
        module = load_user_module(source, f"--agent {name}")
        if not hasattr(module, attribute):
            raise ConfigError(f"--agent {name}: {source} has no attribute {attribute!r}")
        agent = getattr(module, attribute)
    return _as_agent_function(name, agent)


def is_async(agent: AgentFunction) -> TypeGuard[Callable[..., Awaitable[Returned]]]:
    """Return whether an agent is a coroutine function, or an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (agent, type(agent).__call__)))


def program_ended(end: SystemExit) -> UserCodeError:
    """Return the error of a rollout whose agent exited the program."""
    return UserCodeError(
        f"the agent exited the program ({end.code}) instead of returning an answer"
    )


def _entry_point(name: str) -> object:
    if name.endswith(".py"):
        raise ConfigError(f"--agent {name} does not name a function; use {name}:function")
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        known = f"installed: {', '.join(sorted(found.names))}" if found.names else "none installed"
        raise ConfigError(
            f"--agent {name}: no such entry point in the group {ENTRY_POINTS} ({known}); for your "
            "own function, use file.py:function"
        )
    try:
        return found[name].load()
    except Exception as error:
        raise ConfigError(f"--agent {name}: {type(error).__name__}: {error}") from error


def _as_agent_function(name: str, agent: object) -> AgentFunction:
    if not callable(agent):
        raise ConfigError(f"--agent {name}: {agent!r} is not a function of (task, endpoint)")
    check_agent_function(agent, f"--agent {name}")
    function: AgentFunction = agent
    return function

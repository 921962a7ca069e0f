"""What the rollouts of one worker process of a training engine share, for as long as it lives."""

import asyncio
from typing import Any

from agentrl.agents.endpoint import Completions
from agentrl.agents.hosts import AgentHosts, HostSettings

MODEL = "policy"
"""Name under which agents ask for the trained model."""

_shared: dict[str, Any] = {}


async def shared_completions() -> Completions:
    """Return the endpoint that agents talk to, started when it is first needed."""
    if "completions" not in _shared:
        _shared["completions"] = asyncio.ensure_future(Completions.start())
    started: Completions = await _shared["completions"]
    return started


def shared_hosts(settings: HostSettings) -> AgentHosts:
    """Return the processes that play the agent, started when they are first needed."""
    if "hosts" not in _shared:
        _shared["hosts"] = AgentHosts(settings)
    hosts: AgentHosts = _shared["hosts"]
    return hosts

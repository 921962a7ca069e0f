"""What the rollouts of one worker process of a training engine share, for as long as it lives."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from agentrl.integrations.agent_worker.worker_pool import AgentHosts, HostSettings
from agentrl.rollout.agent import OpenAIServer

MODEL = "policy"
"""Name under which agents ask for the trained model."""

_shared: dict[str, Any] = {}


async def shared_server() -> OpenAIServer:
    """Return the endpoint that agents talk to, opened when it is first needed."""
    if "server" not in _shared:
        _shared["open"] = AsyncExitStack()
        opening = _shared["open"].enter_async_context(OpenAIServer.open("127.0.0.1"))
        _shared["server"] = asyncio.ensure_future(opening)
    server: OpenAIServer = await _shared["server"]
    return server


def shared_hosts(settings: HostSettings) -> AgentHosts:
    """Return the processes that play the agent, started when they are first needed."""
    if "hosts" not in _shared:
        _shared["hosts"] = AgentHosts(settings)
    hosts: AgentHosts = _shared["hosts"]
    return hosts

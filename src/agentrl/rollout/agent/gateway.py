"""`Gateway`: where the agents of a sampler process reach the policy."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from agentrl.config.sections import AgentSection
from agentrl.inference.dialects.openai_server import OpenAIServer
from agentrl.inference.dialects.upstream import Upstream
from agentrl.rollout.agent.endpoint import AgentEndpoint
from agentrl.rollout.agent.recording import RecordingSession
from agentrl.rollout.async_sampler import AsyncSampler

log = logging.getLogger(__name__)

_UPSTREAM_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class Gateway:
    """Opens a door for every rollout; `open` is the usual way to one."""

    def __init__(
        self, section: AgentSection, model: str, upstream: Upstream, server: OpenAIServer
    ) -> None:
        self._section = section
        self._model = model
        self._upstream = upstream
        self._server = server

    @classmethod
    @asynccontextmanager
    async def open(cls, section: AgentSection, model: str) -> AsyncIterator["Gateway"]:
        """Listen on a free port until the context ends.

        Args:
            section: where to listen, and routes to other models.
            model: name of the trained model.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        async with (
            httpx.AsyncClient(timeout=_UPSTREAM_TIMEOUT) as client,
            OpenAIServer.open(section.agent_gateway_host) as server,
        ):
            log.info("agents reach the policy at %s", server.address)
            yield cls(section, model, Upstream(section.agent_routes or {}, client), server)

    @asynccontextmanager
    async def session(self, sampler: AsyncSampler[Any]) -> AsyncIterator[RecordingSession]:
        """Open the door of one rollout; it closes with the context."""
        session = RecordingSession(sampler, self._section, self._model, self._upstream)
        async with self._server.serve(session):
            yield session

    def endpoint(self, session: RecordingSession) -> AgentEndpoint:
        """Return what an agent has to know to reach a rollout's model."""
        return AgentEndpoint(self._server.base_url(session), session.model, session.key)

"""What tests of agents share: an endpoint server over real clients, and an agent that runs as a rollout."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from support.play import Serving, claim, open_play

from agentrl.config.sections import AgentSection
from agentrl.rollout import RolloutContext, RolloutResult
from agentrl.rollout.agent import AgentEndpoint, AgentEndpointServer, AgentFunction, AgentSampler
from agentrl.rollout.evaluated_route import open_evaluated_route
from agentrl.schema import DispatchedSamplingTask, Record, rebuild_prompts
from agentrl.store import TrajectoryStore

MODEL = "train-model"
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks a price up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Stage:
    """A process's context and its endpoint server."""

    context: RolloutContext
    endpoints: AgentEndpointServer

    async def play(
        self, agent: AgentFunction
    ) -> tuple[RolloutResult, list[DispatchedSamplingTask]]:
        """Claim the next slot, let the agent play it, and return what is stored."""
        record, task = await claim(self.context.store)
        sampler = AgentSampler(task, record, self.context, agent=agent, endpoints=self.endpoints)
        result = await sampler.run()
        await sampler.finish()
        return result, await self.context.store.turns.of_record(record.id)

    async def sampler(self, agent: AgentFunction) -> tuple[AgentSampler, Record]:
        """Claim the next slot for the agent."""
        record, task = await claim(self.context.store)
        sampler = AgentSampler(task, record, self.context, agent=agent, endpoints=self.endpoints)
        return sampler, record


@asynccontextmanager
async def open_stage(
    store: TrajectoryStore,
    engine: Serving,
    *,
    agents: AgentSection | None = None,
    **play: Any,
) -> AsyncIterator[Stage]:
    """Yield a context over the engine, and an endpoint server."""
    section = agents or AgentSection()
    async with (
        open_play(store, engine, None, **play) as context,
        open_evaluated_route(section) as route,
        AgentEndpointServer.open(section, MODEL) as endpoints,
    ):
        yield Stage(replace(context, evaluated_route=route), endpoints)


@asynccontextmanager
async def client_of(endpoint: AgentEndpoint) -> AsyncIterator[AsyncOpenAI]:
    """Yield OpenAI's own client for an endpoint."""
    async with AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        yield client


def assert_prompts_as_sent(
    turns: Sequence[DispatchedSamplingTask], requests: Sequence[Sequence[int]]
) -> None:
    """Check that what the engine was sent is what the store gives back; in any order."""
    sent = sorted(np.array(ids, dtype=np.int32).tobytes() for ids in requests)
    assert sorted(ids.tobytes() for ids in rebuild_prompts(turns)) == sent

"""A run that a benchmark's samplers play: its database, its server and what all rollouts share."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import McpToolBox
from harness.server_heartbeats import kept_registered

MODEL = Path(__file__).resolve().parents[2] / "assets/demo/model"


@asynccontextmanager
async def open_store(mongo: EmbeddedMongo) -> AsyncIterator[TrajectoryStore]:
    """Yield a new, empty store."""
    async with TrajectoryStore.connect(mongo.uri(f"bench_{uuid.uuid4().hex[:8]}")) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name="bench", status="training", admitted_groups=1_000_000))
        yield store
        await store.drop_database()


@asynccontextmanager
async def served_by(
    store: TrajectoryStore, url: str, pool: ServerPool | None = None
) -> AsyncIterator[ServerPool]:
    """Yield a pool of one server, which the store's samplers find too."""
    server = InferenceService(id="engine", base_url=url, backend="embedded", model_path="m")
    async with pool or ServerPool() as servers, kept_registered(store, server):
        servers.update([server])
        yield servers


def rollout_context(
    store: TrajectoryStore,
    pool: ServerPool,
    toolbox: McpToolBox,
    sampling: SamplingSection,
    rollout: RolloutSection,
) -> RolloutContext:
    """Return what rollouts of the demo's model share."""
    return RolloutContext(
        store=store,
        servers=pool,
        renderer=Renderer.load(MODEL),
        toolbox=toolbox,
        scoring=RegisteredScoring(),
        rollout=rollout,
        sampling=sampling,
    )


async def play(context: RolloutContext, sampler: MakeSampler = MCPSampler) -> SamplingLoop:
    """Run all tasks of the store."""
    loop = SamplingLoop(context, "bench", sampler)
    await loop.run(asyncio.Event(), asyncio.Event())
    return loop

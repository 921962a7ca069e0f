"""What tests of groups that branch share: a sampler process's loop, and what a branch must hold."""

import asyncio
from typing import Any

from pymongo import MongoClient
from support.patience import PATIENCE

from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.sampling_loop import LoopTimes, SamplingLoop
from agentrl.schema import BranchPoint, DispatchedSamplingTask, Record, rebuild_prompts
from agentrl.store import TrajectoryStore

TIMES = LoopTimes(busy_refresh=0.05, idle_poll=0.05, report=0.1, scoring=0.1, log_progress=10)


async def run(context: RolloutContext, make: MakeSampler = MCPSampler) -> SamplingLoop:
    async def keep_alive() -> None:
        while True:
            await context.store.services.heartbeat("engine")
            await asyncio.sleep(2)

    loop = SamplingLoop(context, "tester", make, times=TIMES)
    beating = asyncio.create_task(keep_alive())
    try:
        await asyncio.wait_for(loop.run(asyncio.Event(), asyncio.Event()), PATIENCE)
    finally:
        beating.cancel()
    return loop


async def turns_of(store: TrajectoryStore, record: Record) -> list[DispatchedSamplingTask]:
    return await store.turns.of_record(record.id)


async def assert_leaves_its_parent(store: TrajectoryStore, record: Record) -> BranchPoint:
    """The turns before the branch are copies of the parent's, and those from it on are its own."""
    point = record.branch
    assert point is not None
    turns, parents = await turns_of(store, record), await store.turns.of_record(point.record_id)
    prompts, their_prompts = rebuild_prompts(turns), rebuild_prompts(parents)
    for index, turn in enumerate(turns[: point.turn]):
        assert turn.record_id == record.id
        assert turn.output_ids.tobytes() == parents[index].output_ids.tobytes()
        assert turn.output_logprobs.tobytes() == parents[index].output_logprobs.tobytes()
        assert turn.tool_results == parents[index].tool_results
        assert turn.sampling_params == parents[index].sampling_params
    assert prompts[point.turn].tobytes() == their_prompts[point.turn].tobytes()
    sampled = turns[point.turn]
    assert sampled.sampling_params.seed != parents[point.turn].sampling_params.seed
    return point


def lose_snapshots(mongo_uri: str) -> None:
    """Remove all snapshots from a database, also while an event loop cannot wait."""
    with MongoClient[Any](mongo_uri) as client:
        client.get_default_database().blobs.delete_many({"kind": "snapshot"})

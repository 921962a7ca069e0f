"""How an evaluation ends that nothing can be said about."""

import asyncio

import pytest
from support.stored import claim, make_task

from agentrl.errors import StoreError
from agentrl.evaluation.held_out import evaluate
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


async def test_an_evaluation_without_a_score_names_the_reason(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training"))
    evaluation = asyncio.create_task(
        evaluate(
            store,
            [make_task(1, num_generations=1)],
            version=0,
            reuse=False,
            timeout_seconds=60.0,
            stop=asyncio.Event(),
        )
    )
    async with asyncio.timeout(20):
        while not await store.tasks.count(tag="eval@0"):
            await asyncio.sleep(0.01)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "the agent returned int", 1)
    said = rf"none of 1 questions got a score; {record.id}: the agent returned int; see .* failures"
    with pytest.raises(StoreError, match=said):
        await evaluation

"""How an evaluation ends that nothing can be said about."""

import asyncio
from typing import Any

import pytest
from support.stored import make_task

from agentrl.errors import StoreError
from agentrl.evaluation.held_out import evaluate
from agentrl.schema import Run
from agentrl.store import TrajectoryStore

CLAIM: Any = {"lease_seconds": 60.0, "admitted_groups": 1, "max_attempts": 1}


async def test_an_evaluation_without_a_score_names_the_reason(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training"))
    evaluation = asyncio.create_task(
        evaluate(
            store,
            [make_task(1, num_generations=1)],
            step=0,
            version=0,
            reuse=False,
            timeout_seconds=60.0,
            stop=asyncio.Event(),
        )
    )
    async with asyncio.timeout(120):
        while not (claimed := await store.records.claim("sampler", **CLAIM)):
            await asyncio.sleep(0.01)
    record = claimed[0]
    await store.records.fail_attempt(record.id, record.fence, "the agent returned int", 1)
    said = rf"none of 1 questions got a score; {record.id}: the agent returned int; see .* failures"
    with pytest.raises(StoreError, match=said):
        await evaluation

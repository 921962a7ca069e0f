"""Requests of many callers in one batch: whose result is whose, and whose error."""

import asyncio
from collections.abc import Sequence

import pytest
from pymongo.errors import AutoReconnect, BulkWriteError

from agentrl.store import TrajectoryStore
from agentrl.store.writes import MAX_BATCH, Coalescer, insert_new


async def test_a_batch_holds_everything_that_came_before_its_callers_item() -> None:
    batches: list[list[int]] = []

    async def run(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        return [10 * item for item in items]

    coalescer = Coalescer(run)
    numbers = range(MAX_BATCH + 20)
    patient = [asyncio.create_task(coalescer.submit(n, wait_seconds=60)) for n in numbers]
    await asyncio.sleep(0)
    assert await coalescer.submit(-1) == -10
    assert await asyncio.gather(*patient) == [10 * n for n in numbers]
    assert batches == [[*numbers, -1]]


async def test_an_error_that_passes_is_left_to_the_callers_repetition() -> None:
    batches: list[list[int]] = []

    async def run(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        raise AutoReconnect("gone")

    with pytest.raises(AutoReconnect):
        await Coalescer(run).submit(1)
    assert batches == [[1]]


async def test_another_error_beside_a_duplicate_is_raised(store: TrajectoryStore) -> None:
    collection = store.database["blobs"]
    assert await insert_new(collection, [{"_id": "a"}, {"_id": "b"}], bypass_validator=True) == 2
    assert await insert_new(collection, [{"_id": "a"}, {"_id": "c"}], bypass_validator=True) == 1
    with pytest.raises(BulkWriteError):
        await insert_new(collection, [{"_id": "a"}, {"_id": ["no", "id"]}], bypass_validator=True)

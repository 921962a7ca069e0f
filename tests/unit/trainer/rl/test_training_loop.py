import asyncio

import pytest

from agentrl.errors import StoreError
from agentrl.trainer.rl.training_loop import run_concurrently


async def test_concurrent_work_is_done_or_its_error_raised_or_it_ends_with_the_block() -> None:
    done: list[float] = []

    async def work(seconds: float, error: Exception | None = None) -> None:
        await asyncio.sleep(seconds)
        if error:
            raise error
        done.append(seconds)

    async with run_concurrently(work(0.01)):
        assert not done
    assert done == [0.01]
    with pytest.raises(StoreError, match="away"):
        async with run_concurrently(work(0, StoreError("away"))):
            pass
    with pytest.raises(ValueError, match="first"):
        async with run_concurrently(work(60)):
            raise ValueError("first")
    assert done == [0.01]

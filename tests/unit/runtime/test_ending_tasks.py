import asyncio
import sys

import pytest
from support.patience import PATIENCE

from agentrl.runtime import ending_tasks
from agentrl.runtime.ending_tasks import end_tasks


async def test_a_task_that_loses_a_cancellation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_tasks, "CANCEL_AGAIN_SECONDS", 0.05)
    woken = asyncio.get_running_loop().create_future()
    rounds: list[int] = []

    async def chore() -> None:
        while True:
            rounds.append(len(rounds))
            await asyncio.wait_for(woken if len(rounds) == 1 else asyncio.Event().wait(), PATIENCE)

    task = asyncio.create_task(chore())
    await asyncio.sleep(0)
    # It is cancelled in the same iteration of the loop in which its wait ends.
    woken.set_result(None)
    await asyncio.wait_for(end_tasks([task]), PATIENCE)
    assert task.cancelled()
    assert len(rounds) == (2 if sys.version_info < (3, 12) else 1)


async def test_the_error_of_an_ended_task_is_left_to_the_caller() -> None:
    async def fail() -> None:
        raise ValueError("too late")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks([task])
    await end_tasks([])
    with pytest.raises(ValueError, match="too late"):
        task.result()

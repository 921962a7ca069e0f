import asyncio
import sys

import pytest
from support.patience import PATIENCE

from agentrl.runtime import ending_tasks
from agentrl.runtime.ending_tasks import end_tasks, joint_tasks


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


async def test_joint_tasks_raise_the_first_error_as_it_is_and_end_the_others() -> None:
    async def fail() -> None:
        raise ValueError("first") from KeyError("its cause")

    async def both() -> None:
        async with joint_tasks() as group:
            tasks.append(group.create_task(asyncio.Event().wait()))
            group.create_task(fail())

    tasks: list[asyncio.Task[bool]] = []
    with pytest.raises(ValueError, match="first") as raised:
        await both()
    assert tasks[0].cancelled()
    assert isinstance(raised.value.__cause__, KeyError)


async def test_joint_tasks_are_awaited() -> None:
    async with joint_tasks() as group:
        tasks = [group.create_task(asyncio.sleep(0, number)) for number in range(2)]
    assert [task.result() for task in tasks] == [0, 1]

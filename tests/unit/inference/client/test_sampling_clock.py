"""The clock by which rollouts are timed: it stands still while all servers sleep."""

import asyncio
import time

import pytest

from agentrl.inference.client.pool import SamplingClock
from agentrl.schema import InferenceService, ServiceStatus

TURN_SECONDS = 0.2


def services(*statuses: ServiceStatus) -> list[InferenceService]:
    return [
        InferenceService(
            id=str(number), base_url="http://h", backend="embedded", model_path="m", status=status
        )
        for number, status in enumerate(statuses)
    ]


async def test_only_the_sleep_of_all_servers_stops_the_clock() -> None:
    clock = SamplingClock()
    for statuses in (("asleep", "up"), ("down",), ("updating",), ()):
        clock.note(services(*statuses))
        before = clock.now()
        await asyncio.sleep(0.002)
        assert clock.now() > before, statuses
    clock.note(services("asleep", "down"))
    before = clock.now()
    await asyncio.sleep(0.01)
    assert clock.now() == before
    clock.note(services("asleep", "down"))
    assert clock.now() == pytest.approx(before, abs=1e-6)
    clock.note(services("up", "down"))
    assert clock.now() == pytest.approx(before, abs=1e-3)


async def test_a_bound_waits_for_as_long_as_servers_sleep() -> None:
    clock = SamplingClock()
    clock.note(services("asleep"))
    asyncio.get_running_loop().call_later(TURN_SECONDS, clock.note, services("up"))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with clock.timeout_at(clock.now() + 0.05):
            await asyncio.Event().wait()
    assert time.monotonic() - started > TURN_SECONDS


async def test_a_bound_that_has_passed_ends_what_waits_and_not_what_is_done() -> None:
    clock = SamplingClock()
    async with clock.timeout_at(clock.now() - 1):
        done = True
    assert done
    with pytest.raises(TimeoutError):
        async with clock.timeout_at(clock.now() - 1):
            await asyncio.Event().wait()

"""How many rollouts samplers play at once, on servers that can take so many and no more."""

import logging
import time
from datetime import timedelta

import pytest

from agentrl.inference.client.load_balancing import Pressure
from agentrl.rollout.worker.admission_limits import (
    START_PER_SERVER,
    UNKNOWN_PER_SERVER,
    ConcurrencyLimit,
    WaitingTimes,
)
from agentrl.schema import InferenceService, ServerLoad, utc_now

START = utc_now()
ENDING_SHARE = 0.2
"""Of the rollouts, in a second."""


def pressure_of(
    num_running: int, capacity: int, second: int, pressure: Pressure, max_running: int = 0
) -> Pressure:
    """One server that lets wait what is beyond its capacity."""
    load = ServerLoad(
        num_running=min(num_running, capacity),
        num_waiting=max(0, num_running - capacity),
        max_running=max_running,
        token_usage=min(1.0, num_running / capacity) * 0.85,
        at=START + timedelta(seconds=second),
    )
    pressure.note(
        [InferenceService(id="s", base_url="u", backend="sglang", model_path="m", load=load)]
    )
    return pressure


class Samplers:
    """Several processes that see the same server and know nothing of each other."""

    def __init__(self, count: int) -> None:
        self.limits = [ConcurrencyLimit(None) for _ in range(count)]
        self.pressures = [Pressure() for _ in range(count)]
        self.running = [0] * count
        self.second = 0

    def play(self, capacity: int, seconds: int, joined: int) -> list[int]:
        """Go on for a while; returns how many ran in each second."""
        totals = []
        for _ in range(seconds):
            self.second += 1
            total = sum(self.running)
            totals.append(total)
            for n in range(joined):
                pressure = pressure_of(total, capacity, self.second, self.pressures[n])
                limit = self.limits[n].of(
                    pressure, num_servers=1, num_running=self.running[n], most=10_000
                )
                left = self.running[n] - int(self.running[n] * ENDING_SHARE)
                self.running[n] = max(left, limit)
        return totals


def test_limit_finds_what_the_servers_take_and_follows_its_changes() -> None:
    samplers = Samplers(1)
    begun = samplers.play(200, 15, joined=1)
    assert max(begun) > 200
    settled = samplers.play(200, 200, joined=1)
    assert 0.75 * 200 < sum(settled) / len(settled) < 1.2 * 200
    fewer = samplers.play(50, 200, joined=1)[40:]
    assert 0.75 * 50 < sum(fewer) / len(fewer) < 1.4 * 50
    more = samplers.play(150, 300, joined=1)[150:]
    assert 0.75 * 150 < sum(more) / len(more) < 1.2 * 150


def test_sampler_that_comes_late_gets_an_equal_share() -> None:
    samplers = Samplers(2)
    samplers.play(200, 100, joined=1)
    samplers.play(200, 600, joined=2)
    shares = [0, 0]
    for _ in range(200):
        samplers.play(200, 1, joined=2)
        shares = [share + running for share, running in zip(shares, samplers.running, strict=True)]
    assert 0.7 < shares[0] / shares[1] < 1.4


def test_limit_that_is_not_used_does_not_grow() -> None:
    limit, pressure = ConcurrencyLimit(None), Pressure()
    for second in range(20):
        pressure_of(0, 100, second, pressure)
        assert limit.of(pressure, num_servers=2, num_running=3, most=500) == 2 * START_PER_SERVER


def test_limit_waits_for_a_decrease_to_take_effect() -> None:
    limit, pressure = ConcurrencyLimit(None), Pressure()
    found = [
        limit.of(pressure_of(100, 50, second, pressure), num_servers=1, num_running=100, most=100)
        for second in range(10)
    ]
    assert found == [START_PER_SERVER] * 10  # all of it is more than it may be already


def test_given_number_is_kept_whatever_the_servers_say() -> None:
    limit, pressure = ConcurrencyLimit(5), Pressure()
    for second in range(5):
        pressure_of(100, 50, second, pressure)
        assert limit.of(pressure, num_servers=3, num_running=20, most=500) == 15
    assert limit.of(pressure, num_servers=3, num_running=20, most=10) == 10


def test_samplers_hold_no_more_than_the_servers_run_at_once() -> None:
    limits, pressure = [ConcurrencyLimit(None) for _ in range(3)], Pressure()
    of = {"num_servers": 1, "num_running": 1000, "most": 1000, "num_samplers": 3}
    for second in range(20):
        pressure_of(0, 10_000, second, pressure, max_running=32)
        assert [limit.of(pressure, **of) for limit in limits] == [11] * 3
    updating = InferenceService(
        id="s", base_url="u", backend="sglang", model_path="m", status="updating"
    )
    pressure.note([updating])  # it does not report now
    assert limits[0].of(pressure, **of) == 11
    pressure.note([])
    assert limits[0].of(pressure, **of) == UNKNOWN_PER_SERVER


def test_a_queue_is_a_reason_to_hold_fewer_only_if_memory_is_short() -> None:
    def held(usage: float) -> list[int]:
        limit, pressure, limits = ConcurrencyLimit(None), Pressure(), [0]
        for second in range(30):
            load = ServerLoad(
                num_running=20,
                num_waiting=12 if second > 5 else 0,
                max_running=32,
                token_usage=usage,
                at=START + timedelta(seconds=second),
            )
            server = {"id": "s", "base_url": "u", "backend": "sglang", "model_path": "m"}
            pressure.note([InferenceService(**server, load=load)])
            limits.append(limit.of(pressure, num_servers=1, num_running=limits[-1], most=99))
        assert pressure.is_pressed("u")
        return limits[-20:]

    assert held(0.5) == [32] * 20
    assert held(0.8)[-1] < 8


def test_rollouts_at_their_tools_leave_their_places_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, pressure = ConcurrencyLimit(None), Pressure()
    seconds, num_running = 0.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    for second in range(120):
        # Of three seconds, a rollout spends two at its tools, which know no queue.
        seconds = float(second)
        num_requests = max(num_running / 3, num_running - 2 * 32)
        pressure_of(int(num_requests), 32, second, pressure, max_running=32)
        limit.note(num_running, int(num_requests))
        num_running = limit.of(pressure, num_servers=1, num_running=num_running, most=1000)
        assert num_running <= 3 * 32 + 2
    assert num_running >= 3 * 32 - 4


def test_servers_that_do_not_tell_get_a_number_that_suits_most() -> None:
    limit = ConcurrencyLimit(None)
    found = limit.of(Pressure(), num_servers=2, num_running=0, most=500)
    assert found == limit.current == 2 * UNKNOWN_PER_SERVER


def test_a_sampler_whose_servers_are_gone_says_so_while_its_rollouts_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting = WaitingTimes("test", log_interval_seconds=30.0)
    with caplog.at_level(logging.INFO):
        waiting.switch("admission", is_idle=False)
        waiting.switch("no_server", is_idle=False)
        waiting.switch("no_server", is_idle=False)
        waiting.switch(None, is_idle=False)
        waiting.switch(None, is_idle=False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "run test: no registered inference server is alive, so sampling waits; start one with "
            "`agentrl serve --run_name test` and the run's --db_connection_string, or check the "
            "log of one that should be running",
        ),
        ("INFO", "run test: an inference server is alive; sampling continues"),
    ]

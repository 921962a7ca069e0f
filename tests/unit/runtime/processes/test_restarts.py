"""How many restarts are allowed, and after what pauses."""

import time

import pytest

from agentrl.runtime.processes import restarts
from agentrl.runtime.processes.restarts import Restarts, ending


def test_pauses_grow_up_to_a_bound_and_restarts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MAX_DELAY_SECONDS", 5.0)
    counted = Restarts(4)
    assert [counted.next_delay() for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, None, None]
    assert counted.total == 4


def test_restarts_long_ago_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counted = Restarts(1)
    assert [counted.next_delay(), counted.next_delay()] == [1.0, None]
    now += restarts.WINDOW_SECONDS + 1
    assert counted.next_delay() == 1.0
    assert counted.total == 2


def test_an_end_is_told_in_words() -> None:
    assert ending(-9) == "was killed by SIGKILL"
    assert ending(-40) == "was killed by signal 40"
    assert ending(75) == "exited with status 75"

"""A loop that stands still is noticed, with the line at which it does."""

import asyncio
import re
import threading
import time

import pytest
from support.patience import PATIENCE

from agentrl.runtime.telemetry import loop_watch
from agentrl.runtime.telemetry.loop_watch import LoopWatch


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED_SECONDS", 0.2)
    monkeypatch.setattr(loop_watch, "_CHECK_SECONDS", 0.05)


async def test_a_blocked_loop_is_told_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch("the loop", "do not")
    with watch.watching(asyncio.get_running_loop()):
        await asyncio.sleep(1)
        assert watch.notice == ""
        until = time.monotonic() + PATIENCE
        while not watch.notice and time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251  what is to be noticed
        await asyncio.sleep(0.5)
    assert re.fullmatch(
        r"the loop has been blocked for 0\.2 s at \S*test_loop_watch\.py:\d+: do not", watch.notice
    )
    assert caplog.messages == [watch.notice]


async def test_the_watching_ends_with_its_context() -> None:
    before = set(threading.enumerate())
    with LoopWatch("the loop", "").watching(asyncio.get_running_loop()):
        [watcher] = set(threading.enumerate()) - before
    await asyncio.to_thread(watcher.join, PATIENCE)
    assert not watcher.is_alive()

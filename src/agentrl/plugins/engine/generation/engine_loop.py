"""`EngineLoop`: the thread that owns the scheduler, and the only access to it.

Calls run between two steps, so their changes (weights and their version, a pause) take effect for
all sequences at the same token.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler
from agentrl.plugins.engine.generation.token_sequence import TokenSequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED_STEPS = 8
"""After so many failed steps in a row, the engine counts as failing."""
_FIRST_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class _Call:
    run: Callable[[], Any]
    future: "Future[Any]"
    when_idle: bool


class EngineLoop:
    """Runs a scheduler in its own thread."""

    def __init__(self, scheduler: BatchScheduler, num_threads: int | None) -> None:
        self._scheduler = scheduler
        self._num_threads = num_threads
        self._calls: deque[_Call] = deque()
        self._when_idle: deque[_Call] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._num_failed_steps = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last steps have all failed. May be read from any thread."""
        return self._num_failed_steps >= MAX_FAILED_STEPS

    def start(
        self,
        *,
        on_events: Callable[[list[TokenSequence], list[TokenSequence]], object],
        on_death: Callable[[], object],
    ) -> None:
        """Start the thread.

        Both are called in the thread: `on_events` with sequences that ended and streams that grew,
        `on_death` when it cannot continue.
        """
        main = partial(self._main, on_events, on_death)
        self._thread = threading.Thread(target=main, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; waiting calls are cancelled."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def call(self, run: Callable[[], T], *, when_idle: bool = False) -> "Future[T]":
        """Run a call between two steps.

        With `when_idle`, after all sequences currently in flight have ended, unless nothing can be
        computed anyway; later sequences wait for the call.
        """
        future: Future[T] = Future()
        self._calls.append(_Call(run, future, when_idle))
        self._wake.set()
        return future

    def _main(
        self,
        on_events: Callable[[list[TokenSequence], list[TokenSequence]], object],
        on_death: Callable[[], object],
    ) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        # In this thread only: checks of requests distinguish subnormal numbers from 0.
        torch.set_flush_denormal(True)
        try:
            while not self._is_stopping:
                self._wake.clear()
                self._run_calls()
                if self._scheduler.has_work:
                    self._step()
                finished, streamed = self._scheduler.take_events()
                if finished or streamed:
                    on_events(finished, streamed)
                self._pause_after_failures()
                if not self._scheduler.has_work and not self._may_run_idle_call():
                    self._wake.wait()
        except Exception:
            logger.exception("the engine cannot continue")
            on_death()
        finally:
            self._is_stopping = True
            for call in [*self._calls, *self._when_idle]:
                call.future.cancel()

    def _step(self) -> None:
        try:
            self._scheduler.step()
            self._num_failed_steps = 0
        except Exception as error:
            logger.exception("a step failed; computing its sequences one by one")
            self._scheduler.step_failed(error)
            self._num_failed_steps += 1

    def _pause_after_failures(self) -> None:
        """Wait longer with each failed step in a row, or until the next call."""
        if self._num_failed_steps:
            doublings = min(self._num_failed_steps, MAX_FAILED_STEPS) - 1
            self._wake.wait(_FIRST_PAUSE_SECONDS * 2**doublings)

    def _run_calls(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            if call.when_idle:
                self._when_idle.append(call)
                self._scheduler.drain(True)
            else:
                _run_call(call)
        while self._may_run_idle_call():
            _run_call(self._when_idle.popleft())
            if not self._when_idle:
                self._scheduler.drain(False)

    def _may_run_idle_call(self) -> bool:
        scheduler = self._scheduler
        return bool(self._when_idle) and (scheduler.is_idle or scheduler.is_halted)


def _run_call(call: _Call) -> None:
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        call.future.set_result(call.run())
    except Exception as error:  # noqa: BLE001 - the caller handles it
        call.future.set_exception(error)

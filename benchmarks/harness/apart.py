"""What something costs a process: seconds, memory, and the time in which its event loop stood still.

    cost = apart(work, *arguments)      in a process of its own

`work` is an async function of a `Meter` and the arguments; what it does inside of `with meter:`
counts, and what it returns becomes a part of the cost.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.loop_watchdog import LoopWatchdog


class PeakMemory:
    """The largest resident memory of a process beyond that of now."""

    def __init__(self, pid: int | str = "self") -> None:
        self._folder = Path("/proc") / str(pid)
        (self._folder / "clear_refs").write_text("5")
        self._before = self._kilobytes("VmRSS")

    def megabytes(self) -> float:
        """Return the megabytes since."""
        return round((self._kilobytes("VmHWM") - self._before) / 1024, 1)

    def _kilobytes(self, name: str) -> int:
        status = (self._folder / "status").read_text(encoding="ascii", errors="replace")
        (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
        return int(line.split()[1])


class Meter:
    """Measures what happens inside of its context."""

    def __init__(self) -> None:
        self.cost: dict[str, float] = {}
        self._watchdog = LoopWatchdog()
        self._watching = self._watchdog.watching()

    def __enter__(self) -> Self:
        self._peak = PeakMemory()
        self._watching.__enter__()
        self._began = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.cost["seconds"] = round(time.monotonic() - self._began, 3)
        self._watching.__exit__(kind, error, at)
        self.cost["stall_ms"] = round(1000 * self._watchdog.longest_seconds, 1)
        self.cost["megabytes"] = self._peak.megabytes()


Work = Callable[..., Awaitable[dict[str, Any]]]


def apart(work: Work, *arguments: Any) -> dict[str, Any]:
    """Do it in a process of its own, and return what it found and cost.

    Raises:
        RuntimeError: the process died of it.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_work, args=(there, work, arguments))
    child.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{work.__name__} ended its process: {child.exitcode}") from None
    child.join()
    return found


def _work(answer: Any, work: Work, arguments: tuple[Any, ...]) -> None:
    async def measured() -> dict[str, Any]:
        meter = Meter()
        found = await work(meter, *arguments)
        return found | meter.cost

    answer.send(asyncio.run(measured()))

"""Real processes that are cheap to start again: forked from a server that has everything imported.

A killed trainer would otherwise spend seconds on its imports, and a long run most of its time.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = [
    "chaos.sampler",
    "chaos.trainer",
    "agentrl.cli.main",
    "agentrl.plugins.engine.__main__",
]
TESTS, SOURCES = Path(__file__).parents[1], Path(__file__).parents[2] / "src"

_forked = multiprocessing.get_context("forkserver")


def _end_with_harness() -> None:
    harness = multiprocessing.parent_process()
    assert harness is not None
    harness.join()
    os._exit(1)


def _run(main: Callable[[Sequence[str]], int], argv: Sequence[str], log: Path) -> None:
    threading.Thread(target=_end_with_harness, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, stream)
    sys.exit(main(argv))


@dataclass
class Member:
    """A process that is started again whenever it ends."""

    name: str
    main: Callable[[Sequence[str]], int]
    argv: Sequence[str]
    log: Path
    started: float = 0.0
    process: BaseProcess = field(init=False)

    def start(self) -> None:
        """Start it (again)."""
        arguments = (self.main, self.argv, self.log)
        self.process = _forked.Process(target=_run, args=arguments, name=self.name, daemon=True)
        self.process.start()
        self.started = time.monotonic()

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self.process.kill()
        self.process.join()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def last_line(self) -> str:
        """Return what it said last."""
        return self.log.read_text(errors="replace").strip().rpartition("\n")[2]


@contextmanager
def running(members: Sequence[Member]) -> Iterator[None]:
    """Keep the members inside the block, and end them all behind it."""
    # The fork server knows nothing of this process's `sys.path`.
    paths = [
        str(TESTS),
        str(TESTS.parent / "benchmarks"),
        str(SOURCES),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    _forked.set_forkserver_preload(PRELOADED)
    try:
        for member in members:
            member.start()
        yield
    finally:
        for member in members:
            member.kill()

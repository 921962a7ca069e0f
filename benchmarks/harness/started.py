"""Starts a command of the package as a process and watches it, its output and its children."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.processes import ROOT

START_SECONDS = 120
END_SECONDS = 60


class Started:
    """A process of the command line and what it writes."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process = process
        self._output = output

    def said(self) -> str:
        """Return what it has written."""
        return self._output.read_text()

    def until(self, happened: Callable[[], object]) -> None:
        """Wait until something has happened."""
        deadline = time.monotonic() + START_SECONDS
        while not happened():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def children(self) -> list[psutil.Process]:
        """Return all that it started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, words: str) -> psutil.Process:
        """Return the one child with these words in its command."""
        (found,) = [one for one in self.children() if words in " ".join(one.cmdline())]
        return found

    def end(self, number: signal.Signals) -> int:
        """Send one signal; return the exit status once it and all that it started have ended."""
        children = self.children()
        self.process.send_signal(number)
        status = self.process.wait(END_SECONDS)
        assert psutil.wait_procs(children, timeout=5)[1] == []
        return status


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[Started]:
    """Yield a command that runs; it ends, with its children, with the context."""
    with (folder / "said").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    running = Started(process, folder / "said")
    children: list[psutil.Process] = []
    try:
        yield running
    finally:
        if process.poll() is None:
            children = running.children()
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def metrics(folder: Path) -> list[dict[str, object]]:
    """Return the steps that a run in a folder has made."""
    path = folder / "output/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

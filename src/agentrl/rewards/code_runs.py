"""Runs Python that a model wrote, for scorers and tools: without network, files or much memory."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from agentrl.errors import ConfigError
from agentrl.runtime.loop_slots import LoopSlots
from agentrl.runtime.processes.child_processes import signal_group
from agentrl.runtime.processes.wall import Wall, scratch_directory, wall_gap

MAX_OUTPUT_BYTES = 64 * 1024
"""How much of its output is returned."""
MAX_FILE_BYTES, MAX_DISK_BYTES = 16 << 20, 64 << 20
"""Longest file, and output, of a program; and all of its files."""
_DIRECTORY = "/agentrl-code"
_LAST_SECONDS = 0.5
"""How long a program may still run when that which it is connected to has ended."""
_slots = LoopSlots(max(1, (os.cpu_count() or 1) // 2))
_START = """\
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.argv = ["program.py"]
sys.path.insert(0, {directory!r})
runpy.run_path({directory!r} + "/program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class CodeRun:
    """How a program ended."""

    status: int | None
    """Its exit status; None if it took too long."""
    output: str
    """Its standard output, up to `MAX_OUTPUT_BYTES`."""
    errors: str
    """Its standard error, likewise; or the limit of time, if that ended it."""
    seconds: float
    """How long it ran."""


async def run_python(
    program: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    seconds: float = 10.0,
    memory_megabytes: int = 1024,
) -> CodeRun:
    """Run a Python program in namespaces of its own, and return how it ended.

    It sees the machine's programs, this Python with its packages, and an empty working directory;
    no other file, process or network. It ends with this call, and all that it started with it. At
    most half as many programs run at a time as the machine has cores.

    Args:
        program: its source.
        stdin: its standard input.
        files: text files of its working directory, by name.
        seconds: how long it may run.
        memory_megabytes: memory of each of its processes.

    Raises:
        ConfigError: this machine has no namespaces, and the program would see the user's files.
    """
    async with _room() as root:
        program_files = {**(files or {}), "program.py": program}
        return await asyncio.to_thread(_run, root, program_files, stdin, seconds, memory_megabytes)


async def run_connected(
    program: str,
    files: Mapping[str, str],
    other_files: Mapping[str, str],
    *,
    seconds: float,
    memory_megabytes: int = 1024,
) -> tuple[CodeRun, CodeRun]:
    """Run a program twice, each in namespaces and a directory of its own, until the second ends.

    What one prints is the input of the other; nothing else connects them.

    Args:
        program: its source.
        files: text files of the first's working directory, by name.
        other_files: those of the second's.
        seconds: how long both may run.
        memory_megabytes: memory of each of their processes.
    """
    async with _room() as root:
        both = [{**one, "program.py": program} for one in (files, other_files)]
        return await asyncio.to_thread(_run_connected, root, both, seconds, memory_megabytes)


def code_gap() -> str | None:
    """Return why code of a model cannot run on this machine; None if it can."""
    gap = wall_gap()
    if gap is None:
        return None
    return f"code of a model runs only in namespaces of its own, which this machine refuses ({gap})"


@asynccontextmanager
async def _room() -> AsyncIterator[Path]:
    """Wait until a program may run, and yield a directory for it."""
    gap = code_gap()
    if gap is not None:
        raise ConfigError(gap)
    async with _slots.here():
        # The directory may hold files that only its owner can remove: the program is gone by then.
        with scratch_directory("agentrl-code-") as root:
            yield Path(root)


def _run(
    root: Path, files: Mapping[str, str], stdin: str, seconds: float, memory_megabytes: int
) -> CodeRun:
    (root / "stdin").write_text(stdin, errors="replace")
    # Files rather than pipes: the limit of their size is the kernel's, and nothing has to be read.
    with (
        (root / "stdin").open("rb") as given,
        (root / "output").open("w+b") as output,
        _started(root / "program", files, given, output, memory_megabytes) as program,
    ):
        run = replace(program.end(seconds), output=_shown(output))
    return run if run.status is not None else replace(run, errors=f"no end within {seconds:g} s")


def _run_connected(
    root: Path, both: Sequence[Mapping[str, str]], seconds: float, memory_megabytes: int
) -> tuple[CodeRun, CodeRun]:
    with ExitStack() as stack:
        # An end that stays open here would hide from one of them that the other has ended.
        with ExitStack() as ends:
            pipes = [os.pipe(), os.pipe()]
            for end in itertools.chain(*pipes):
                ends.callback(os.close, end)
            first, second = (
                stack.enter_context(_started(root / name, files, read, write, memory_megabytes))
                for name, files, (read, _), (_, write) in zip(
                    ("first", "second"), both, pipes, reversed(pipes), strict=True
                )
            )
        ended = second.end(seconds)
        return first.end(_LAST_SECONDS), ended


class _Program:
    """A program that was started."""

    def __init__(self, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self._started = time.monotonic()

    def end(self, seconds: float) -> CodeRun:
        """Wait until it has ended, and kill it after that time."""
        try:
            status: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        return CodeRun(status, "", _shown(self._errors), time.monotonic() - self._started)

    def kill(self) -> None:
        """End it with all that it started."""
        if self._process.returncode is None:
            signal_group(self._process.pid)
            self._process.wait()


@contextmanager
def _started(
    root: Path,
    files: Mapping[str, str],
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    memory_megabytes: int,
) -> Iterator[_Program]:
    _write_files(root / "work", files)
    wall = Wall(
        memory_bytes=memory_megabytes << 20,
        disk_bytes=MAX_DISK_BYTES,
        places={_DIRECTORY: root / "work"},
        directory=_DIRECTORY,
        network=False,
    )
    start = _START.format(size=MAX_FILE_BYTES, directory=_DIRECTORY)
    with (root / "errors").open("w+b") as errors:
        process = subprocess.Popen(
            wall.command([sys.executable, "-I", "-B", "-c", start]),
            stdin=stdin,
            stdout=stdout,
            stderr=errors,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": _DIRECTORY},
            start_new_session=True,
        )
        program = _Program(process, errors)
        try:
            yield program
        finally:
            program.kill()


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is outside of the working directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogatepass")


def _shown(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")

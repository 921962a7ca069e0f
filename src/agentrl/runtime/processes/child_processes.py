"""Supervised child processes that end with their parent; each has a process group and a log file.

Only processes that were started here are ever signalled.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Self

import psutil

from agentrl.config.private_files import make_private
from agentrl.runtime.processes.restarts import Restarts

logger = logging.getLogger(__name__)

LOG_BYTES = 64 << 20
"""Size from which a log file is rotated."""
KEPT_LOGS = 3
"""Number of earlier files, `NAME.log.1` being the last one."""
CHECK_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_KEEPER = Path(__file__).with_name("process_keeper.py")


def program(word: str) -> str:
    """Return the program that the first word of a user's command line stands for.

    `python` is this interpreter. Programs of this environment are found even if it is not active,
    so that the programs installed together with AgentRL run.
    """
    if word in ("python", "python3"):
        return sys.executable
    sibling = Path(sys.executable).parent / word
    return str(sibling) if shutil.which(word) is None and sibling.is_file() else word


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a `preexec_fn` that has the kernel signal a child when this process dies.

    It runs between fork and exec, so it also covers third-party programs. Linux only; None
    elsewhere. The kernel ties a child to the thread that started it: start children from the main
    thread.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # load it before the fork: few calls are safe after it
    parent = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_death_signal


def run_to_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program in the foreground, and return its exit status.

    It gets SIGTERM when this process dies. SIGINT is passed on, and raises KeyboardInterrupt once
    the program has ended.
    """
    with subprocess.Popen(
        command, env=environment, preexec_fn=end_with_parent(signal.SIGTERM)
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # Ctrl-C reached it already, `kill` did not
            process.wait()
            raise


def keeper_command(command: Sequence[str]) -> list[str]:
    """Return a command line that runs a command whose descendants end with it, and with this process.

    SIGHUP to the started process kills all of them (`process_keeper`). Linux only; elsewhere it is the
    command itself, and descendants that leave its process group outlive it.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), *command]


async def _always() -> bool:
    return True


async def never() -> bool:
    """Return False: the `Child.is_done` of a process that runs until it is stopped."""
    return False


@dataclass
class Child:
    """One supervised child process."""

    name: str
    argv: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits_environment: bool = True
    """Whether it inherits this process's environment variables."""
    restarts: Restarts = field(default_factory=Restarts)
    """How often it is restarted after a failure; by default a failure is final."""
    may_restart: Callable[["Child", int], bool] = lambda child, status: True
    """Whether a restart may fix a failure with this exit status, or the early end of status 0."""
    is_done: Callable[[], Awaitable[bool]] = _always
    """Asked when it exits with status 0; False if it should not have ended, as after a signal."""
    has_failed: bool = False
    """Whether it ended, too early or with an error, and is not restarted."""
    stop_seconds: float = 15.0
    """Grace period after SIGTERM before it is killed."""
    process: asyncio.subprocess.Process | None = None
    stopping: bool = False
    log_offset: int = 0
    """Size of its log file at the last start, in bytes; output of earlier starts precedes it."""

    @property
    def pid(self) -> int | None:
        """Process id of the current incarnation."""
        return self.process.pid if self.process else None

    def log_tail(self, num_lines: int = 5) -> str:
        """Return the last lines that the child wrote to its log, for error messages."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self.log_offset)
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-num_lines:])


class Supervisor:
    """Starts children, restarts those that may be restarted, and stops all on exit (async context)."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[int]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children.values():
            child.stopping = True  # children that exit from now on are not restarted
        # Children of one kind (`sampler_0`, `sampler_1`) are stopped together, later kinds first.
        names_reversed = list(reversed(self._children))
        for _, names in groupby(names_reversed, key=lambda name: name.rstrip("0123456789")):
            await asyncio.gather(*map(self.stop, names))

    async def start(self, child: Child) -> None:
        """Start a child; its output is appended to its log file.

        Call it from the main thread: the kernel ties a child to the thread that started it.
        """
        if child.name in self._children:
            raise ValueError(f"a child named {child.name!r} is already running")
        await self._spawn(child)
        self._children[child.name] = child
        self._watchers[child.name] = asyncio.create_task(self._watch(child))

    async def wait(self, name: str) -> int:
        """Wait until the child has exited and is not restarted; return its exit status."""
        return await asyncio.shield(self._watchers[name])

    @property
    def num_restarts(self) -> dict[str, int]:
        """Number of restarts of every child that was restarted, by its name."""
        return {
            name: child.restarts.total
            for name, child in self._children.items()
            if child.restarts.total
        }

    def failed(self) -> Child | None:
        """Return a child that failed and will not be restarted, or None."""
        for name, watcher in self._watchers.items():
            child = self._children[name]
            if watcher.done() and child.has_failed and not child.stopping:
                return child
        return None

    async def stop(self, name: str, *, at_once: bool = False) -> None:
        """Stop and remove a child: SIGTERM to the process, then SIGKILL to its group."""
        child = self._children.get(name)
        if child is None or child.process is None:
            return
        child.stopping = True
        process = child.process
        if process.returncode is None:
            if not at_once:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 0 if at_once else child.stop_seconds)
            except TimeoutError:
                signal_group(process.pid)
                await process.wait()
        watcher = self._watchers.pop(name)
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        # Kill processes that the child left in its group.
        signal_group(process.pid)
        del self._children[name]

    async def _spawn(self, child: Child) -> None:
        make_private(child.log_path.parent)
        child.log_path.touch(0o600)
        with child.log_path.open("ab") as log:
            child.log_offset = log.tell()
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**(os.environ if child.inherits_environment else {}), **child.environment},
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGTERM),
            )

    async def _watch(self, child: Child) -> int:
        while True:
            assert child.process is not None
            status = await _until_ended(child, child.process)
            if child.stopping or (status == 0 and await child.is_done()):
                return status
            delay = child.restarts.next_delay() if child.may_restart(child, status) else None
            if delay is None:
                child.has_failed = True
                return status
            # Remaining processes of its group would keep its ports and its memory.
            signal_group(child.process.pid)
            message = f"{child.name} {child.restarts.describe(status)}"
            logger.warning("%s", message)
            with child.log_path.open("a") as log:
                log.write(f"--- {message}\n")
            await asyncio.sleep(delay)
            await self._spawn(child)


async def _until_ended(child: Child, process: asyncio.subprocess.Process) -> int:
    """Return the exit status of a process, whose log file is rotated until it ends."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=CHECK_SECONDS)
            if await asyncio.to_thread(rotate, child.log_path):
                child.log_offset = 0
        return waiting.result()
    finally:
        waiting.cancel()


def rotate(path: Path) -> bool:
    """Move the content of a log file to `PATH.1`, if it is large; return whether it was.

    The file itself stays, since its writers hold it. They must append to it (`O_APPEND`). Lines that
    they write during the copy's last moment are lost.
    """
    try:
        if path.stat().st_size < LOG_BYTES:
            return False
    except FileNotFoundError:
        return False
    earlier = [path.with_name(f"{path.name}.{number}") for number in range(KEPT_LOGS, 0, -1)]
    for older, newer in pairwise(earlier):
        if newer.exists():
            newer.replace(older)
    shutil.copy2(path, earlier[-1])
    with path.open("r+b") as log:
        log.truncate()
    return True


def kill_descendants() -> None:
    """Kill all processes that this one and its children started, in any process group."""
    for descendant in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            descendant.kill()


async def end_group(
    process: asyncio.subprocess.Process, numbers: Sequence[signal.Signals], pause_seconds: float
) -> None:
    """Send signals to a program and all of its group, with pauses, and then kill what is left."""
    for number in numbers:
        if process.returncode is None:
            signal_group(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), pause_seconds)
    signal_group(process.pid)


def signal_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the group of a process that leads one, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

"""Ends a program together with all that it started: `python -I -S process_keeper.py PARENT COMMAND...`.

Runs COMMAND and returns its status. All descendants of the program are killed when it exits,
including orphans and those that left its process group: the kernel reparents orphans to this
process. All of them are killed when the process PARENT dies, and on SIGHUP. SIGTERM is meant for
the program; it is sent to the group of both. No part of AgentRL is imported here, which keeps the
startup fast.
"""

import ctypes
import os
import resource
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = frozenset((signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT))
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0
_END_POLL_SECONDS = 0.005
_CANNOT_START = 127


def main(parent: int, command: list[str]) -> int:
    """Run a command and return its exit status, as `subprocess` represents it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(_exec(command))
    # Release the program's pipes, so that their readers notice when it exits.
    devnull = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(devnull, number)
    status = _watch(program, parent)
    _kill_descendants()
    return status


def _exec(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    return _CANNOT_START


def _watch(program: int, parent: int) -> int:
    """Reap children until the program exits or has to be killed."""
    while os.getppid() == parent:
        received = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
        if received is not None and received.si_signo == signal.SIGHUP:
            break
        while (reaped := _reap()) is not None and reaped[0]:
            if reaped[0] == program:
                return os.waitstatus_to_exitcode(reaped[1])
    return -signal.SIGKILL


def _reap() -> tuple[int, int] | None:
    """Return an exited child with its status; 0 if none has exited, and None if there is no child."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None


def _kill_descendants() -> None:
    """Kill children until none are left; this process inherits the children of dead ones."""
    deadline = time.monotonic() + _END_SECONDS
    while (reaped := _reap()) is not None and time.monotonic() < deadline:
        if reaped[0]:
            continue
        for child in _children():
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:  # it has exited, or belongs to another user
                continue
        time.sleep(_END_POLL_SECONDS)


def _children() -> list[int]:
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has just exited
            continue
        if int(fields[1]) == os.getpid():
            children.append(int(name))
    return children


def _exit_like(status: int) -> None:
    """Exit with the status of the program, or by the signal that killed it."""
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if status != -signal.SIGKILL:  # its handler cannot be set
        signal.signal(-status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
    os.kill(os.getpid(), -status)


if __name__ == "__main__":
    _exit_like(main(int(sys.argv[1]), sys.argv[2:]))

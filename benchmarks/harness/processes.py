"""Starts, awaits and ends server processes for benchmarks and tests.

Each function yields the address of a responding server, and ends its process on exit.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.runtime.ports import free_port

ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0
"""Generous: a busy machine is slow, and a server that fails exits at once."""


@contextmanager
def listening_process(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server from the repository's root; yields its address once it listens.

    Args:
        command: program and arguments; `{port}` stands for a free port.
        environment: additional variables, with `{port}` as well.
    """
    port = free_port()
    process = subprocess.Popen(
        [str(word).replace("{port}", str(port)) for word in command],
        cwd=ROOT,
        env=os.environ
        | {name: text.replace("{port}", str(port)) for name, text in (environment or {}).items()},
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            assert process.poll() is None, f"{command[0]} ended"
            assert time.monotonic() < deadline, f"{command[0]} does not listen on port {port}"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def engine_process(
    model: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    is_sacrificed: bool = False,
) -> Iterator[str]:
    """Run `python -m agentrl.plugins.engine` on a free port; yields its address.

    The caller may kill or stop a sacrificed engine; its exit status is not checked.
    """
    command = [sys.executable, "-m", "agentrl.plugins.engine", "--model-path", str(model)]
    command += ["--port", "0", "--num-threads", "1", *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | dict(environment or {}),
    )
    assert process.stderr is not None
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    lines: list[str] = []
    # An unread pipe fills up and blocks the engine.
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    try:
        address = None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                address = found[0]
                break
        watchdog.cancel()
        reader.start()
        assert address is not None, "".join(lines)
        yield address
    finally:
        watchdog.cancel()
        if is_sacrificed:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            reader.join()
            process.stderr.close()
    log = "".join(lines)
    if is_sacrificed:
        return
    assert process.returncode == 0, log
    assert "Traceback" not in log, log

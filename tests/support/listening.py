"""Server processes that are told which port to listen on."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.runtime.ports import free_port

ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0


@contextmanager
def listening_process(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server from the repository's root; yields its address once it listens.

    Args:
        command: program and arguments; `{port}` stands for a free port.
        environment: further variables, with `{port}` as well.
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

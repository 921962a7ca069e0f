"""A real SGLang on the CPU, where `scripts/sglang_cpu install` has put one."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "sglang_cpu"
_START_SECONDS = 200


def sglang_bin() -> Path:
    """Return the folder of SGLang's commands; skips the test where it is not installed."""
    found = subprocess.run([_SCRIPT, "bin"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("SGLang is not installed here; scripts/sglang_cpu install does it")
    return Path(found.stdout.strip())


def sglang_args() -> str:
    """Return the arguments that SGLang needs on a CPU."""
    return subprocess.run([_SCRIPT, "args"], capture_output=True, text=True, check=True).stdout


@contextmanager
def sglang_process(
    model: Path, log: Path, *args: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run SGLang on a free port, with further arguments; yields its address."""
    sglang_bin()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command: list[str | Path] = [
        _SCRIPT,
        "serve",
        model,
        "--port",
        str(port),
        "--weight-version",
        "1",
        *args,
    ]
    # The health route is to say whether the server is there; by default it samples a token, which
    # takes as long as a pause.
    health = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **health, **(environment or {})},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"SGLang did not start:\n{log.read_text()[-3000:]}")

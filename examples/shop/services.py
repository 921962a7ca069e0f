"""The shop's tool server, and a model service that is not trained, for the length of a block."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

TOOLS_URL = "http://127.0.0.1:8765/mcp"
EDITOR_URL = "http://127.0.0.1:8766/v1"
_START_SECONDS = 60.0


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Start both with the Python that AGENTRL_PYTHON names, and end them afterwards."""
    python = os.environ.get("AGENTRL_PYTHON", sys.executable)
    children = []
    try:
        for module, url in (("server", TOOLS_URL), ("editor", EDITOR_URL)):
            port = url.split("/")[2].partition(":")[2]
            argv = [python, "-m", f"examples.shop.{module}", "--port", port]
            children.append(subprocess.Popen(argv))
            _wait(url, children[-1])
        yield
    finally:
        for child in children:
            child.terminate()
            child.wait()


def _wait(url: str, child: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError:
            return  # the server answers, though with an error
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"no service at {url}; is the port taken?")

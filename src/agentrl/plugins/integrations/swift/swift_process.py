"""Trains with ms-swift, beside its rollout server.

`python -m agentrl.plugins.integrations.swift.swift_process FOLDER` starts `swift rollout` with the
folder's `rollout.yaml` and `swift rlhf` with its `swift.yaml`. Whichever ends first ends the other.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_POLL_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    """Return the exit status: that of the training, or 1 if the server ended before it.

    Args:
        argv: the folder.
    """
    # As after Ctrl-C: the block below ends both, whatever ends this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(argv[0])
    files = {"rollout": folder / "rollout.yaml", "rlhf": folder / "swift.yaml"}
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, path in files.items():
            words = ["-m", "swift.cli.main", name, str(path)]
            command = [sys.executable, *words]
            children[name] = subprocess.Popen(command, start_new_session=True)
        while all(child.poll() is None for child in children.values()):
            time.sleep(_POLL_SECONDS)
        status = children["rlhf"].poll()
        if status is None:
            sys.stderr.write("swift rollout ended before the training; see its output\n")
        return 1 if status is None else status
    finally:
        for child in children.values():
            # ms-swift's command starts the process that works: both are in the child's group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What processes did, written where no database is needed to read it again.

A line is appended in one write, so it outlives a process that is killed in the next instant.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to a file that many processes share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **facts: Any) -> None:
        """Append one event; `at` is the machine's monotonic clock."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **facts})
        os.write(self._file, line.encode() + b"\n")


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in the order in which they were written."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)

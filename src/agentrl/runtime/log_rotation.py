"""Log files of bounded size, whose writers keep them open: a process's standard output."""

import shutil
from itertools import pairwise
from pathlib import Path

LOG_BYTES = 64 << 20
"""Size from which a log file is rotated."""
KEPT_LOGS = 3
"""Number of earlier files, `NAME.log.1` being the last one."""
CHECK_SECONDS = 10.0


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

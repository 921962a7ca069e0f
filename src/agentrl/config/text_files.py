"""Text files that flags name: configurations, tool servers, chat templates.

Input: a path. Output: the file's text, at once or not at all: a pipe would block its reader, and a
device such as /dev/zero has no end.
"""

import errno
import os
import stat
from pathlib import Path

_MAX_CHARS = 16 << 20


def read_text_file(path: Path) -> str:
    """Return the text of a regular file of at most 16 Mi characters, without a byte order mark.

    Raises:
        OSError: it cannot be read, is not a regular file, is too long, or is not UTF-8 text;
            `strerror` tells a user what to do.
    """
    try:
        with open(path, encoding="utf-8-sig", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "devices and pipes are not supported; give a file")
            text = file.read(_MAX_CHARS + 1)
    except FileNotFoundError as error:
        error.strerror = f"{error.strerror} in {path.absolute().parent}"
        raise
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not UTF-8 text; save it as UTF-8") from None
    if len(text) > _MAX_CHARS:
        raise OSError(
            errno.EFBIG, f"longer than {_MAX_CHARS >> 20} Mi characters; give a shorter file"
        )
    return text


def _open_at_once(path: str, flags: int) -> int:
    # Opening a pipe would otherwise wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)

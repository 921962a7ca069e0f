"""The console of a run, which outlives the reader of its output.

A closed pipe (`| head`, a `tee` that Ctrl-C ended), a lost terminal and a full disk end the output,
and neither the run nor the orderly end of its processes.
"""

import io
import logging
import os
import sys
from typing import TextIO, cast

from rich.console import Console

logger = logging.getLogger(__name__)


def run_console() -> Console:
    """Return a console on standard output whose write errors are logged once, and not raised."""
    return Console(file=cast(TextIO, FailSafeOutput(sys.stdout)))


class FailSafeOutput(io.TextIOBase):
    """A text stream that discards its text after the first write error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Write the text, or discard it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        # The buffer keeps the text of a failed write and writes it again, at exit at the latest.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        logger.warning(
            "standard output: %s; the run continues, and Ctrl-C or SIGTERM stops it", error.strerror
        )

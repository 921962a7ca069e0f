"""Logging of a process: one redacted line a record, on the console and in the process's own file."""

import copy
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.private_files import make_private
from agentrl.config.secrets import redact
from agentrl.runtime.printable import one_line, printable

_NOISY = (
    "httpx",
    "httpcore",
    "httpx2",
    "httpcore2",
    "mcp",
    "pymongo",
    "asyncio",
    "filelock",
    "uvicorn.access",
    "torch.distributed.pipelining",
)


_MAX_LINE_CHARS = 10_000
_MAX_TRACE_CHARS = 100_000


REPEATS_PER_MINUTE = 60
"""Warnings and errors from one line of code that are logged within a minute."""
_REPEAT_SECONDS = 60.0


@dataclass
class _Repeats:
    since: float
    count: int = 0


class RepeatLimit:
    """Bounds what a loop of failures writes: a filter that all handlers of a process share.

    Lines below WARNING pass, since their number follows from the work done.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._repeats: dict[tuple[str, int], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; the last one before and the first after a gap say so."""
        if record.levelno < logging.WARNING:
            return True
        is_kept: bool | None = getattr(record, "is_kept", None)
        if is_kept is None:  # no other handler has asked
            is_kept = record.is_kept = self._count(record)
        return is_kept

    def _count(self, record: logging.LogRecord) -> bool:
        now, place = self._clock(), (record.pathname, record.lineno)
        repeats = self._repeats.setdefault(place, _Repeats(now))
        num_left_out = 0
        if now - repeats.since > _REPEAT_SECONDS:
            num_left_out = max(0, repeats.count - REPEATS_PER_MINUTE)
            self._repeats[place] = repeats = _Repeats(now)
        repeats.count += 1
        if num_left_out:
            _note(record, f"{num_left_out:,} lines like this one were left out")
        elif repeats.count == REPEATS_PER_MINUTE:
            _note(record, "further lines like this one are left out for a minute")
        return repeats.count <= REPEATS_PER_MINUTE


def _note(record: logging.LogRecord, note: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({note})", None


class _OneLineFormatter(logging.Formatter):
    """Formats records without secrets, and escapes text that could imitate another record."""

    def format(self, record: logging.LogRecord) -> str:
        bare_record = copy.copy(record)
        bare_record.exc_info = bare_record.exc_text = bare_record.stack_info = None
        text = super().format(bare_record)[:_MAX_TRACE_CHARS]
        output = one_line(redact(text), _MAX_LINE_CHARS)
        if record.exc_info:
            trace = redact(self.formatException(record.exc_info)[-_MAX_TRACE_CHARS:])
            output += "\n" + textwrap.indent(printable(trace), "    ")
        return output


def setup_logging(process: str, log_file: Path | None = None, *, console: bool = True) -> None:
    """Send this process's log lines to the console and, when given, to a file (appending).

    The level comes from `LOG_LEVEL` (default INFO). Libraries that log every request are limited to
    WARNING. Repeated warnings and errors are bounded, see `RepeatLimit`.
    """
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    formatter = _OneLineFormatter(
        f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
    )
    handlers: list[logging.Handler] = []
    if console:
        handlers.append(logging.StreamHandler(sys.stderr))
    if log_file is not None:
        make_private(log_file.parent)
        log_file.touch(0o600)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    repeat_limit = RepeatLimit()
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(repeat_limit)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    levels = logging.getLevelNamesMapping()
    root.setLevel(levels.get(level, logging.INFO))
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)

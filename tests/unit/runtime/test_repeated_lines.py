"""What floods the log is cut to a bounded number of lines, and what was cut is counted."""

import logging
from pathlib import Path

from agentrl.runtime.logs import REPEATS_PER_MINUTE, RepeatLimit, setup_logging

log = logging.getLogger("agentrl.x")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_that_repeats_for_ever_is_bounded(
    tmp_path: Path, root_logger: logging.Logger
) -> None:
    root_logger.handlers.clear()
    path = tmp_path / "run.log"
    setup_logging("engine", path)
    for number in range(10_000):
        log.warning("step %d failed", number)
    log.warning("another line")
    for number in range(200):
        log.info("step %d", number)
    written = lines(path)
    assert len(written) == REPEATS_PER_MINUTE + 1 + 200
    assert written[REPEATS_PER_MINUTE - 1].endswith(
        f"step {REPEATS_PER_MINUTE - 1} failed (further lines like this one are left out "
        "for a minute)"
    )


def test_the_lines_left_out_are_counted() -> None:
    now = 0.0
    limit = RepeatLimit(clock=lambda: now)
    kept = []
    for number in range(1_000):
        record = log.makeRecord("x", logging.ERROR, "file.py", 7, "failed: %s", (number,), None)
        if limit.filter(record):
            kept.append(record.getMessage())
    now = 61.0
    record = log.makeRecord("x", logging.ERROR, "file.py", 7, "failed: %s", (1_000,), None)
    assert limit.filter(record)
    assert len(kept) == REPEATS_PER_MINUTE
    left_out = 1_000 - REPEATS_PER_MINUTE
    assert record.getMessage() == f"failed: 1000 ({left_out} lines like this one were left out)"

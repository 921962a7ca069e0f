"""What `scripts/fuzz` asks of the tests that it starts, by environment variables."""

import os
from pathlib import Path

FACTOR, REPORT = "AGENTRL_FUZZ_FACTOR", "AGENTRL_FUZZ_REPORT"


def num_cases_of(in_suite: int) -> int:
    """Return how many cases a target gets that has so many in the suite."""
    return max(1, round(in_suite * float(os.environ.get(FACTOR, "1"))))


def report() -> Path | None:
    """Return the file to which every target adds a line."""
    named = os.environ.get(REPORT)
    return None if named is None else Path(named)

"""Random cases for one target: a few in the suite, as many as `scripts/fuzz` asks for.

    @pytest.mark.fuzz(50)
    def test_any_file_is_read_or_refused(try_cases: TryCases) -> None:
        def check(content: bytes) -> None: ...
        try_cases(check, content=st.binary())

The mark says how many cases the suite tries; `fuzz.asked` may multiply it, and ask for a report.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fuzz.asked import num_cases_of, report
from harness.loop_watchdog import LoopWatchdog
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy


@dataclass
class Tried:
    """What became of the cases of one target."""

    target: str
    num_cases: int = 0
    num_500: int = 0
    """Answers with a status of 500."""
    longest_case_ms: float = 0.0
    """Processor time of this thread in one case: what a loop would stand still."""
    longest_stall_ms: float = 0.0
    """Processor time of one callback of an event loop."""

    def write(self) -> None:
        """Append a line to the report, where one is wanted."""
        if (path := report()) is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")


class TryCases:
    """Calls a check with values of strategies, again and again."""

    def __init__(self, target: str, in_suite: int) -> None:
        self.tried = Tried(target)
        self._num_cases = num_cases_of(in_suite)

    def __call__(self, check: Callable[..., object], **strategies: SearchStrategy[Any]) -> None:
        def case(**values: Any) -> None:
            self.tried.num_cases += 1
            began = time.thread_time()
            check(**values)
            taken = round(1000 * (time.thread_time() - began), 1)
            self.tried.longest_case_ms = max(self.tried.longest_case_ms, taken)

        often = settings(
            max_examples=self._num_cases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        watchdog = LoopWatchdog()
        try:
            with watchdog.watching():
                often(given(**strategies)(case))()
        finally:
            self.tried.longest_stall_ms = round(1000 * watchdog.longest_seconds, 1)
            self.tried.write()
        assert not watchdog.stalls, "\n".join(watchdog.stalls)

    def note_status(self, status: int) -> None:
        """Count an answer of a server; a 500 is for the check to refuse."""
        self.tried.num_500 += status == 500

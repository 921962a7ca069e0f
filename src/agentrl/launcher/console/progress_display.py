"""Console progress of a run: a live panel on a terminal, otherwise lines.

Input: the run's database and its metrics file. Output: the console. `run_panel` defines the layout.
"""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live

from agentrl.errors import StoreError
from agentrl.launcher.console.run_panel import RunView, panel, phase_text, standing_lines, step_line
from agentrl.launcher.console.run_report import say
from agentrl.launcher.console.run_warnings import RunWarnings
from agentrl.store import RunProgress, TrajectoryStore
from agentrl.store.views.first_answers import FirstAnswers

REFRESH_SECONDS = 0.5
QUIET_SECONDS = 60.0
"""Without a terminal: maximum time between two lines."""
READ_SECONDS = 5.0
"""How often evaluations and recent answers are read."""
RATE_WINDOW_SECONDS = 20.0
_EACH_STEP = ("sampling", "training", "publishing")


def draws_in_place(console: Console) -> bool:
    """Return whether output can be overwritten; a notebook cell would show every frame.

    A notebook kernel runs `!agentrl ...` on a hidden terminal, and requests colors from all
    programs.
    """
    is_terminal = console.file.isatty() and not console.is_dumb_terminal
    return is_terminal and "JPY_PARENT_PID" not in os.environ


class Rates:
    """Samples and tokens a second over the last `RATE_WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()
        self.samples = 0.0
        """Scored samples a second, evaluations included."""
        self.tokens = 0.0
        """Sampled tokens a second."""

    def add(self, progress: RunProgress) -> None:
        """Update the display with the current counts."""
        scored = progress.records.get("scored", 0) + progress.eval_records.get("scored", 0)
        now = time.monotonic()
        self._counts.append((now, scored, progress.num_output_tokens))
        while now - self._counts[0][0] > RATE_WINDOW_SECONDS:
            self._counts.popleft()
        first_time, first_scored, first_tokens = self._counts[0]
        elapsed = max(now - first_time, 1e-9)
        # Counts may decrease: a database that was dropped starts at zero again.
        self.samples = max(0.0, (scored - first_scored) / elapsed)
        self.tokens = max(0.0, (progress.num_output_tokens - first_tokens) / elapsed)


class ProgressDisplay:
    """Follows a run through the store and its metrics file until it is cancelled."""

    def __init__(
        self,
        console: Console,
        store: TrajectoryStore,
        *,
        run_name: str,
        metrics_path: Path,
        max_steps: int,
        num_generations: int = 1,
        max_new_tokens: int | None = None,
        restarts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Start without any state."""
        self._console = console
        self._store = store
        self._metrics_path = metrics_path
        self._restarts = restarts
        self._offset = 0
        self._inode = 0
        self._rates = Rates()
        self._warnings = RunWarnings(store)
        self._started = self._phase_started = self._printed_at = time.monotonic()
        self._read_at = float("-inf")
        self._printed_phase = ""
        self._has_stepped = False
        # The metrics file of a resumed run contains the lines of its earlier steps.
        self._printed_until = time.time()
        self.view = RunView(
            run_name, max_steps, num_generations=num_generations, max_new_tokens=max_new_tokens
        )
        self.first_answers: asyncio.Future[FirstAnswers] = (
            asyncio.get_running_loop().create_future()
        )
        """The report on the starting weights' answers, after it was shown."""

    async def follow(self) -> None:
        """Show the run until cancelled."""
        if not draws_in_place(self._console):
            while True:
                await self.update()
                for line in self._new_lines():
                    say(self._console, line)
                await asyncio.sleep(REFRESH_SECONDS)
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while True:
                await self.update()
                live.update(panel(self.view))
                await asyncio.sleep(REFRESH_SECONDS)

    async def update(self) -> None:
        """Read new data, and print new warnings."""
        view = self.view
        self._read_steps()
        for text in await self._warnings.new():
            say(self._console, f"warning: {text}", "yellow")
        first = self._warnings.first_answers
        if first is not None and not self.first_answers.done():
            self.first_answers.set_result(first)
            say(self._console, str(first), "yellow" if first.lacks_signal else "")
        view.missing, view.lacks_signal = self._warnings.missing, self._warnings.lacks_signal
        view.restarts = self._restarts()
        try:
            view.progress = await self._store.reports.progress()
            is_due = self._is_due()
            if view.phase == "evaluating" or is_due:
                view.evaluations = await self._store.reports.evaluations()
            if is_due:
                view.sampling = await self._store.reports.sampling()
        except StoreError:  # the run does not exist yet, or the store is unreachable
            view.progress = None
        now = time.monotonic()
        if view.progress is not None:
            self._rates.add(view.progress)
            view.samples_per_second, view.tokens_per_second = (
                self._rates.samples,
                self._rates.tokens,
            )
            phase = view.progress.phase or "starting"
            if phase != view.phase:
                view.phase, self._phase_started = phase, now
                view.num_scored_before = view.progress.records.get("scored", 0)
        view.phase_seconds, view.seconds = now - self._phase_started, now - self._started

    def _is_due(self) -> bool:
        """Return whether what is costly to read has to be read again."""
        is_due = time.monotonic() - self._read_at >= READ_SECONDS
        if is_due:
            self._read_at = time.monotonic()
        return is_due

    def _new_lines(self) -> list[str]:
        """Return a line for every new step or phase, or for the current state after a long silence."""
        new_steps = [step for step in self.view.steps if step["time"] > self._printed_until]
        lines = [step_line(step, self.view.max_steps) for step in new_steps]
        self._printed_until = max([self._printed_until, *(step["time"] for step in new_steps)])
        phase = self.view.phase
        self._has_stepped = self._has_stepped or bool(new_steps)
        is_new = phase != self._printed_phase and not (phase in _EACH_STEP and self._has_stepped)
        if is_new:
            self._printed_phase = phase
            lines.append(f"{self.view.seconds:4.0f} s  {phase_text(self.view)}")
        elif not lines and time.monotonic() - self._printed_at >= QUIET_SECONDS:
            lines += standing_lines(self.view)
        if lines:
            self._printed_at = time.monotonic()
        return lines

    def _read_steps(self) -> None:
        """Read the metrics lines that were added since the last call."""
        if not self._metrics_path.exists():
            return
        with self._metrics_path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                # A resuming trainer replaces the file; it then contains the steps before its checkpoint.
                self._inode, self._offset, self.view.steps = inode, 0, []
            file.seek(self._offset)
            chunk = file.read()
        complete_lines = chunk.rpartition(b"\n")[0]
        self._offset += len(complete_lines) + 1 if complete_lines else 0
        self.view.steps += [
            json.loads(line) for line in complete_lines.splitlines() if line.strip()
        ]

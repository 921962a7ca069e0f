"""Console progress of a run: a live panel on a terminal, otherwise lines; and warnings, each printed once.

Input: the run's database and its metrics file. Output: the console. `run_panel` defines the layout.
"""

import asyncio
import json
import os
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from agentrl.config.sections import RootConfig
from agentrl.errors import StoreError
from agentrl.launcher.console.run_panel import RunView, panel, phase_text, standing_lines, step_line
from agentrl.launcher.console.run_report import say
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import counted
from agentrl.store import DEFAULT_CONSUMER, RunProgress, TrajectoryStore
from agentrl.store.views.first_answers import FirstAnswers
from agentrl.store.views.learning_signal import SLOW_SECONDS, MissingScores, damage_text
from agentrl.store.views.reports import Failure

REFRESH_SECONDS = 0.5
QUIET_SECONDS = 60.0
"""Without a terminal: maximum time between two lines."""
READ_SECONDS = 5.0
"""How often evaluations and recent answers are read."""
RATE_WINDOW_SECONDS = 20.0
CHECK_SECONDS = 2.0
MIN_GROUPS = 4
"""Number of groups without signal that triggers the warning."""
MIN_ANSWERS = 8
"""Number of scored attempts after which the first answers are reported at all."""
FIRST_ANSWERS_SECONDS = 90.0
"""Time of sampling after which they are reported, even if few groups are complete."""
MAX_STEPS_DROPPED = 4
"""A step that drops the groups of this many steps for equal scores triggers the warning."""
MIN_ATTEMPTS = 4
"""Number of failed attempts, without any score, that triggers the warning."""
_NEARLY_ALL = 0.9
_COLLAPSED_SCORE = 0.5
_DAMAGE_STEPS = 30
_MAX_ERROR_CHARS = 400
_SAMPLER_SECONDS = 60.0
"""Maximum heartbeat age of a live sampler."""
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


class RunWarnings:
    """Reads a run's progress, and checks for problems every `CHECK_SECONDS`."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._checked_at = float("-inf")
        self._reported: set[str] = set()
        self.progress: RunProgress | None = None
        """None while the run does not exist or the store is unreachable."""
        self.missing: MissingScores | None = None
        self.lacks_signal = False
        """Whether the groups consumed so far had no learning signal."""
        self.first_answers: FirstAnswers | None = None
        """The report on the starting weights' answers, once there are enough."""
        self._starts_fresh: bool | None = None
        """Whether the run had no step when it was first seen."""
        self._sampling_since: float | None = None

    async def new(self) -> list[str]:
        """Return the new warnings; none while the store is unreachable."""
        try:
            progress = self.progress = await self._store.reports.progress()
            if time.monotonic() - self._checked_at < CHECK_SECONDS:
                return []
            self._checked_at = time.monotonic()
            found = await self._current_warnings(progress)
        except StoreError:
            self.progress = None
            return []
        new = [text for kind, text in found.items() if kind not in self._reported]
        self._reported.update(found)
        return new

    async def _current_warnings(self, progress: RunProgress) -> dict[str, str]:
        """Return all current problems by kind, with their messages."""
        reports = self._store.reports
        missing = self.missing = await reports.missing_scores()
        found = {**_score_warnings(missing), **await self._sampler_notices()}
        for one in progress.untaught:
            if one.process is None:
                found[f"teacher {one.teacher}"] = str(one)
        if missing.num_failed and "failed" not in self._reported:
            (last,) = await reports.failures(1)
            failed = counted(missing.num_failed, "record")
            found["failed"] = f"all attempts failed for {failed}, {self._describe(last)}"
        if progress.step == 0 and not progress.records.get("scored"):
            failures = await reports.failures(MIN_ATTEMPTS)
            if sum(failure.num_failed_attempts for failure in failures) >= MIN_ATTEMPTS:
                found["failing"] = f"every attempt has failed so far, {self._describe(failures[0])}"
        await self._read_first_answers(progress)
        may_lack = progress.step == 0 and progress.num_groups_consumed >= MIN_GROUPS
        if may_lack and not self.lacks_signal:
            signal = await reports.signal()
            if not signal.num_kept:
                found["signal"] = f"no learning signal so far: {signal}"
        self.lacks_signal = may_lack and (self.lacks_signal or "signal" in found)
        found.update(await self._damage(progress))
        may_drop = progress.step > 0 and progress.phase == "sampling"
        if may_drop and "dropping" not in self._reported:
            found.update(await self._step_warning(progress))
        return found

    async def _damage(self, progress: RunProgress) -> dict[str, str]:
        if progress.step == 0 or "damage" in self._reported:
            return {}
        figures = self._store.figures
        steps = await figures.last_steps(DEFAULT_CONSUMER, _DAMAGE_STEPS)
        text = damage_text(steps, await figures.evaluations(DEFAULT_CONSUMER))
        return {"damage": text} if text else {}

    async def _read_first_answers(self, progress: RunProgress) -> None:
        """Read the report when whole groups are scored, or when sampling has taken some time.

        The first step may be done by then: its attempts are the same.
        """
        has_steps = progress.step > 0
        if self._starts_fresh is None:
            self._starts_fresh = not has_steps
        if not self._starts_fresh or self.first_answers is not None:
            return
        now = time.monotonic()
        if self._sampling_since is None and progress.phase == "sampling":
            self._sampling_since = now
        is_late = self._sampling_since is not None and (
            now - self._sampling_since >= FIRST_ANSWERS_SECONDS
        )
        has_groups = progress.num_groups_completed >= min(MIN_GROUPS, progress.groups_per_step)
        has_answers = progress.records.get("scored", 0) >= MIN_ANSWERS
        if has_steps or has_groups or (is_late and has_answers):
            self.first_answers = await self._store.reports.first_answers()

    async def _step_warning(self, progress: RunProgress) -> dict[str, str]:
        """Return a warning about a step that waits for samples and drops nearly all of them."""
        step = progress.step + 1
        signal = await self._store.reports.signal(step=step)
        min_dropped = MAX_STEPS_DROPPED * progress.groups_per_step
        if signal.num_equal < max(min_dropped, _NEARLY_ALL * signal.num_groups):
            return {}
        text = f"step {step} drops nearly every group: {signal}"
        if signal.mean_score is not None and signal.mean_score < _COLLAPSED_SCORE:
            text += (
                "\n  if the reward fell in the preceding steps, the policy has collapsed and "
                "will not recover: stop the run, and start a new one with a smaller "
                "--learning_rate or with dual_clip 3 (docs/advanced.md)"
            )
        return {"dropping": text}

    async def _sampler_notices(self) -> dict[str, str]:
        samplers = await self._store.samplers.all(alive_within=_SAMPLER_SECONDS)
        notices = {sampler.notice: sampler.id for sampler in samplers if sampler.notice}
        return {
            f"notice: {notice}": f"sampler {name}: {notice}" for notice, name in notices.items()
        }

    def _describe(self, failure: Failure) -> str:
        reason = textwrap.shorten(failure.last_error or failure.error or "", _MAX_ERROR_CHARS)
        command = typed_command("inspect", "failures", "--run_name", self._store.database_name)
        return f"last {failure.record_id}: {reason}; see {command}"


def _score_warnings(missing: MissingScores) -> dict[str, str]:
    found = {}
    if missing.num_unscorable:
        found["unscorable"] = (
            f"a scorer failed, and its records have no score: {missing.unscorable}"
        )
    if missing.num_waiting:
        found["waiting"] = f"a score is missing and scoring is retried: {missing.waiting}"
    if missing.num_slow:
        found["slow"] = (
            f"a scorer is slow: no score for {counted(missing.num_slow, 'record')} after "
            f"{SLOW_SECONDS:.0f} s: {missing.slow}; the samplers' logs show where it is, and "
            "scorer_timeout_seconds (docs/advanced.md) limits it"
        )
    return found


class ProgressDisplay:
    """Follows a run through the store and its metrics file until it is cancelled."""

    def __init__(
        self,
        console: Console,
        store: TrajectoryStore,
        config: RootConfig,
        restarts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Start without any state; `restarts` returns how often each process was restarted."""
        self._console = console
        self._store = store
        self._metrics_path = config.run.output_path / "metrics.jsonl"
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
            config.run.run_name,
            config.trainer.max_steps,
            num_generations=config.data.num_generations,
            max_new_tokens=config.sampling.max_new_tokens,
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
        view, warnings, reports = self.view, self._warnings, self._store.reports
        self._read_steps()
        for text in await warnings.new():
            say(self._console, f"warning: {text}", "yellow")
        first = warnings.first_answers
        if first is not None and not self.first_answers.done():
            self.first_answers.set_result(first)
            say(self._console, str(first), "yellow" if first.lacks_signal else "")
        view.progress, view.missing = warnings.progress, warnings.missing
        view.lacks_signal, view.restarts = warnings.lacks_signal, self._restarts()
        now = time.monotonic()
        if view.progress is not None:
            with suppress(StoreError):
                is_due = now - self._read_at >= READ_SECONDS
                if view.phase == "evaluating" or is_due:
                    view.evaluations = await reports.evaluations()
                if is_due:
                    self._read_at = now
                    view.sampling = await reports.sampling()
            self._rates.add(view.progress)
            view.samples_per_second = self._rates.samples
            # Servers count the tokens of unfinished rollouts, too; not every server says.
            view.tokens_per_second = view.progress.tokens_per_second or self._rates.tokens
            phase = view.progress.phase or "starting"
            if phase != view.phase:
                view.phase, self._phase_started = phase, now
                view.num_scored_before = view.progress.records.get("scored", 0)
        view.phase_seconds, view.seconds = now - self._phase_started, now - self._started

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

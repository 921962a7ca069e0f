"""Warnings about a run in progress: missing scores and teachers, failed rollouts, no learning signal.

Input: the run's database. Output: lines for the console, each printed once.
"""

import textwrap
import time

from agentrl.errors import StoreError
from agentrl.runtime.invocation import typed_command
from agentrl.runtime.printable import counted
from agentrl.store import TrajectoryStore
from agentrl.store.views.first_answers import FirstAnswers
from agentrl.store.views.learning_signal import SLOW_SECONDS, MissingScores
from agentrl.store.views.reports import Failure, RunProgress

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
_MAX_ERROR_CHARS = 400
_SAMPLER_SECONDS = 60.0
"""Maximum heartbeat age of a live sampler."""


class RunWarnings:
    """Checks for problems every `CHECK_SECONDS`."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._checked_at = float("-inf")
        self._reported: set[str] = set()
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
        if time.monotonic() - self._checked_at < CHECK_SECONDS:
            return []
        self._checked_at = time.monotonic()
        try:
            found = await self._current_warnings()
        except StoreError:
            return []
        new = [text for kind, text in found.items() if kind not in self._reported]
        self._reported.update(found)
        return new

    async def _current_warnings(self) -> dict[str, str]:
        """Return all current problems by kind, with their messages."""
        reports = self._store.reports
        missing = self.missing = await reports.missing_scores()
        progress = await reports.progress()
        found = {**_score_warnings(missing), **await self._sampler_notices()}
        for one in progress.untaught:
            if one.process is None:
                found[f"teacher {one.teacher}"] = str(one)
        if missing.num_failed and "failed" not in self._reported:
            (last,) = await reports.failures(1)
            failed = counted(missing.num_failed, "record")
            found["failed"] = f"all attempts failed for {failed}, {self._describe(last)}"
        if progress.policy_version == 0 and not progress.records.get("scored"):
            failures = await reports.failures(MIN_ATTEMPTS)
            if sum(failure.num_failed_attempts for failure in failures) >= MIN_ATTEMPTS:
                found["failing"] = f"every attempt has failed so far, {self._describe(failures[0])}"
        await self._read_first_answers(progress)
        may_lack = progress.policy_version == 0 and progress.num_groups_consumed >= MIN_GROUPS
        if may_lack and not self.lacks_signal:
            signal = await reports.signal()
            if not signal.num_kept:
                found["signal"] = f"no learning signal so far: {signal}"
        self.lacks_signal = may_lack and (self.lacks_signal or "signal" in found)
        may_drop = progress.policy_version > 0 and progress.phase == "sampling"
        if may_drop and "dropping" not in self._reported:
            found.update(await self._step_warning(progress))
        return found

    async def _read_first_answers(self, progress: RunProgress) -> None:
        """Read the report when whole groups are scored, or when sampling has taken some time.

        The first step may be done by then: its attempts are the same.
        """
        has_steps = progress.policy_version > 0
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
        step = progress.policy_version + 1
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

"""Alarms of a run: pure functions on figures that were already read.

Input: figures of the last steps, counts and the fleet. Output: alarm texts, the worst first. The
thresholds prefer few false alarms over early ones.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from agentrl.runtime.printable import counted
from agentrl.schema import ENDED_RUNS, Run
from agentrl.schema.base import Value
from agentrl.schema.training import EQUAL_SCORES
from agentrl.store.views.learning_signal import SLOW_SECONDS, MissingScores, damage_text
from agentrl.store.views.reports import Liveness

SILENT_SECONDS = 30.0
"""A process that has not reported for this long is considered dead."""
ALARM_STEPS = 60
"""Number of last steps that alarms are raised from."""
_RECENT_STEPS = 5
_MIN_STEPS = 10
_MAX_EQUAL_SHARE = 0.9
_MAX_RATIO_DRIFT = 0.15
_MIN_ENTROPY_SHARE = 0.2
_VERSIONS_BEHIND = 2


class Alarm(Value):
    """One existing or imminent problem."""

    kind: str
    severity: Literal["error", "warning"]
    text: str


def find_alarms(
    run: Run,
    steps: Sequence[dict[str, Any]],
    fleet: Liveness,
    missing: MissingScores,
    answers: Sequence[tuple[str | None, ...]],
    evaluations: Sequence[dict[str, Any]] = (),
) -> list[Alarm]:
    """Return the alarms of a run."""
    found = [*_score_alarms(missing), *_step_alarms(steps, evaluations), *_answer_alarms(answers)]
    if run.status not in ENDED_RUNS:
        found += _fleet_alarms(run, fleet)
    return sorted(found, key=lambda alarm: alarm.severity)


def rung_alarms(steps: Sequence[dict[str, Any]]) -> list[tuple[int, Alarm]]:
    """Return the alarms of steps with the step at which each began to ring."""
    found: list[tuple[int, Alarm]] = []
    ringing: set[str] = set()
    for end in range(1, len(steps) + 1):
        alarms = _step_alarms(steps[max(0, end - ALARM_STEPS) : end])
        found += [(steps[end - 1]["step"], one) for one in alarms if one.kind not in ringing]
        ringing = {one.kind for one in alarms}
    return found


def _score_alarms(missing: MissingScores) -> list[Alarm]:
    found = []
    if missing.num_unscorable:
        text = (
            f"no score for {counted(missing.num_unscorable, 'record')}, because the scorer failed"
        )
        found.append(Alarm(kind="unscorable", severity="error", text=text))
    if missing.num_waiting:
        text = f"no score yet for {counted(missing.num_waiting, 'record')}: a judge or the network was down"
        found.append(Alarm(kind="scoring stuck", severity="warning", text=text))
    if missing.num_slow:
        late = counted(missing.num_slow, "record")
        text = f"no score for {late} after {SLOW_SECONDS:.0f} s: the scorer is slow"
        found.append(Alarm(kind="scoring stuck", severity="warning", text=text))
    return found


def _step_alarms(
    steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]] = ()
) -> list[Alarm]:
    found = []
    recent = steps[-_RECENT_STEPS:]
    records = sum(step.get("num_records", 0) for step in recent)
    equal = sum(step.get("dropped", {}).get(EQUAL_SCORES, 0) for step in recent)
    if records and equal / records > _MAX_EQUAL_SHARE:
        text = (
            f"{equal} of the last {records} records are in groups with equal scores: no learning "
            "signal"
        )
        found.append(Alarm(kind="no signal", severity="error", text=text))
    skipped = [step["step"] for step in recent if step.get("skipped")]
    if skipped:
        text = f"steps without an update: {', '.join(map(str, skipped))}"
        found.append(Alarm(kind="skipped steps", severity="error", text=text))
    if damage := damage_text(steps, evaluations):
        found.append(Alarm(kind="policy damage", severity="error", text=damage))
    ratio = _mean(recent, "ratio_mean")
    if ratio is not None and abs(ratio - 1) > _MAX_RATIO_DRIFT:
        text = (
            f"trainer and sampler logprobs disagree: mean importance ratio {ratio:.2f} over the "
            "last steps"
        )
        found.append(Alarm(kind="ratio drift", severity="warning", text=text))
    first, last = _mean(steps[:_RECENT_STEPS], "entropy"), _mean(recent, "entropy")
    if (
        len(steps) >= _MIN_STEPS
        and first
        and last is not None
        and last < first * _MIN_ENTROPY_SHARE
    ):
        text = f"entropy fell from {first:.3g} to {last:.3g} over {len(steps)} steps"
        found.append(Alarm(kind="entropy drift", severity="warning", text=text))
    return found


def _answer_alarms(answers: Sequence[tuple[str | None, ...]]) -> list[Alarm]:
    groups = [group for group in answers if len(group) > 1]
    identical = [group for group in groups if group[0] is not None and len(set(group)) == 1]
    if len(groups) < _RECENT_STEPS or len(identical) / len(groups) <= _MAX_EQUAL_SHARE:
        return []
    text = f"all rollouts gave the same answer in {len(identical)} of the last {len(groups)} groups"
    return [Alarm(kind="answers alike", severity="warning", text=text)]


def _fleet_alarms(run: Run, fleet: Liveness) -> list[Alarm]:
    found = []
    silent = fleet.now - timedelta(seconds=SILENT_SECONDS)
    servers = [one for one in fleet.services if one.heartbeat_at > silent]
    samplers = [one for one in fleet.samplers if one.heartbeat_at > silent]
    is_sampled = any(one.status != "stopped" for one in samplers)
    has_trainer = any(lease.expires_at > fleet.now for lease in run.trainer_leases.values())
    if run.status == "training" and not (has_trainer or is_sampled or servers):
        text = "the run is interrupted: no process works on it, and the command that started it resumes it"
        return [Alarm(kind="interrupted", severity="warning", text=text)]
    if run.status == "training" and not has_trainer:
        text = "no trainer holds a lease on the run: it ended or lost its connection"
        found.append(Alarm(kind="no trainer", severity="error", text=text))
    if run.status == "training" and not is_sampled:
        text = f"no sampler has reported for {SILENT_SECONDS:.0f} s"
        found.append(Alarm(kind="no sampler", severity="error", text=text))
    if fleet.mixed_releases:
        text = fleet.mixed_releases
        found.append(Alarm(kind="mixed releases", severity="warning", text=text))
    down = [one for one in servers if one.status == "down"]
    if down:
        text = f"{len(down)} of {len(servers)} inference servers are down: {down[0].error or 'no reason given'}"
        found.append(Alarm(kind="servers down", severity="error", text=text))
    newest_outdated = run.policy_version - _VERSIONS_BEHIND
    behind = [
        one for one in servers if one.status == "up" and one.policy_version <= newest_outdated
    ]
    if behind:
        text = f"{len(behind)} of {len(servers)} inference servers are behind version {run.policy_version}"
        found.append(Alarm(kind="servers behind", severity="warning", text=text))
    return found


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return sum(values) / len(values) if values else None

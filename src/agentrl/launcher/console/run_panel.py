"""The console output of a run: a panel on a terminal, and plain lines otherwise.

Input: a `RunView`, which `progress_display` keeps up to date. Output: renderables and lines. Nothing
is read here. The panel fits 80x24; a taller terminal also gets the last steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.runtime.printable import counted, one_line
from agentrl.schema import RunPhase
from agentrl.store import RunProgress
from agentrl.store.views.answer_figures import share
from agentrl.store.views.learning_signal import MissingScores
from agentrl.store.views.reports import EvaluationStanding
from agentrl.store.views.sampling_progress import SamplingProgress

PACE_STEPS = 10
"""Number of steps for the median duration of a step."""
MEAN_STEPS = 5
MIN_SCORED = 5
"""Number of scored rollouts from which the first step's date is told."""
_TABLE_LINES = 30
"""Minimum height of a terminal that also shows the last steps."""
_TABLE_STEPS = 8
_LONG_SECONDS = 30.0
"""After this time, a running rollout is named."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class RunView:
    """The displayed data of a run."""

    run_name: str
    max_steps: int
    phase: RunPhase = "starting"
    phase_seconds: float = 0.0
    """How long it has been in this phase."""
    seconds: float = 0.0
    """Time since this command was started."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl."""
    progress: RunProgress | None = None
    evaluations: Sequence[EvaluationStanding] = ()
    """The last evaluations, oldest first; the newest may be running."""
    missing: MissingScores | None = None
    lacks_signal: bool = False
    """Whether nothing could be learned yet."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    sampling: SamplingProgress = field(default_factory=SamplingProgress)
    num_generations: int = 1
    """Rollouts per group."""
    max_new_tokens: int | None = None
    num_scored_before: int = 0
    """Training records that were scored when the phase began."""

    @property
    def num_done(self) -> int:
        """Steps done."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def rewards(self) -> list[float]:
        """Mean rewards of the steps that have one."""
        return [s["reward_mean"] for s in self.steps if s.get("reward_mean") is not None]

    @property
    def seconds_per_step(self) -> float | None:
        """Typical wall time of recent steps without evaluations; None before the second step."""
        ends = [step["time"] for step in self.steps[-PACE_STEPS - 1 :]]
        gaps = sorted(later - earlier for earlier, later in pairwise(ends))
        # The median ignores the long gaps of evaluations and of pauses between two runs.
        return gaps[len(gaps) // 2] if gaps else None

    @property
    def first_step_text(self) -> str:
        """When the first step can be sampled, at the present pace; empty if nothing tells."""
        progress, dropped = self.progress, self.sampling.num_dropped
        if self.steps or self.phase != "sampling" or progress is None:
            return ""
        ready, needed = progress.num_groups_ready, progress.groups_per_step
        if dropped and not ready:
            return f"step 1 has no date: all {dropped} groups so far were dropped"
        num_new = progress.records.get("scored", 0) - self.num_scored_before
        if num_new < MIN_SCORED or ready >= needed:
            return ""
        kept = ready / (ready + dropped) if dropped else 1.0
        remaining = needed * self.num_generations / kept - num_new
        if remaining <= 0:  # what is missing is not among the rollouts that are scored
            return ""
        return f"step 1 in about {duration(self.phase_seconds * remaining / num_new)}"


def panel(view: RunView) -> RenderableType:
    """Return the run as a panel followed by an empty line.

    The terminal writes `^C` at the cursor. After the panel's full last line it would start a new
    line, and the next panel would be drawn too low.
    """
    return Group(_Panel(view), Text(""))


def phase_text(view: RunView) -> str:
    """Return the current activity of the run as text."""
    match view.phase:
        case "starting":
            return "starting the processes"
        case "loading":
            return "loading the model"
        case "evaluating":
            running = [
                evaluation
                for evaluation in view.evaluations
                if evaluation.num_completed < evaluation.num_tasks
            ]
            version = f" version {_questions(running[-1])}" if running else ""
            return f"evaluating{version}"
        case "sampling":
            return (
                "sampling"
                if view.progress is None
                else f"sampling: {_ready_groups(view, view.progress)}"
            )
        case "training":
            return f"training step {view.num_done + 1}"
        case _:
            return f"publishing version {view.num_done + 1}"


def step_line(step: Mapping[str, Any], max_steps: int) -> str:
    """Return one step as a line."""
    reward = step.get("reward_mean")
    reward_text = "   -  " if reward is None else f"{reward:6.3f}"
    seconds = step.get("seconds", {})
    return (
        f"step {step['step']:4d}/{max_steps}  reward {reward_text}  "
        f"staleness {mean_staleness(step):4.2f}  groups {step['num_groups']:3d}  "
        f"tokens {step['num_trained_tokens']:6d}  {sum(seconds.values()):5.1f} s "
        f"(waited {seconds.get('wait_samples', 0.0):4.1f})"
    )


def standing_lines(view: RunView) -> list[str]:
    """Return the state of the run as lines, for the time between two steps."""
    phase, colon, details = phase_text(view).partition(":")
    since = f" for {duration(view.phase_seconds)}" if view.phase_seconds >= 1 else ""
    parts = [f"{duration(view.seconds):>6}  {phase}{since}{colon}{details}"]
    if view.progress is not None and view.phase in ("sampling", "evaluating"):
        parts.append(_rollouts(view))
    further = []
    if view.phase == "sampling":
        further = [_answers(view), _longest(view)]
        parts += [f"{view.tokens_per_second:.0f} tokens/s", view.first_step_text]
    first = ", ".join(part for part in (*parts, *_problems(view)) if part)
    return [first, *(f"        {line}" for line in further if line)]


def mean_staleness(step: Mapping[str, Any]) -> float:
    """Return how many versions old the records of a step were on average."""
    counts = {int(age): count for age, count in step.get("staleness", {}).items()}
    total = sum(counts.values())
    return sum(age * count for age, count in counts.items()) / total if total else 0.0


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


class _Panel:
    """Fits the panel to the terminal when it is drawn."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, width = self._view, options.max_width - 4
        phase = Text(one_line(phase_text(view)), style="bold")
        phase.append(f"  {duration(view.phase_seconds)}", style="not bold dim")
        parts: list[RenderableType] = [phase, _bar(view), Text(""), _figures(view)]
        if view.rewards:
            parts.append(Text(_curve(view.rewards[-width:])))
        if options.size.height >= _TABLE_LINES and view.steps:
            parts += [Text(""), _last_steps(view)]
        yield Panel(Group(*parts), title=Text(one_line(view.run_name)), title_align="left")


def _bar(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None):
        grid.add_column(ratio=ratio, no_wrap=True)
    grid.add_row(
        f"step {view.num_done}/{view.max_steps}",
        ProgressBar(view.max_steps, view.num_done),
        _pace_text(view),
    )
    return grid


def _pace_text(view: RunView) -> str:
    pace = view.seconds_per_step
    if pace is None:
        return view.first_step_text or f"{duration(view.seconds)} so far"
    remaining = (view.max_steps - view.num_done) * pace
    return f"{pace:.1f} s a step, {duration(remaining)} left"


def _figures(view: RunView) -> RenderableType:
    rows = {
        "reward": _reward(view),
        "evaluation": ", ".join(map(_evaluation_text, view.evaluations)),
        "last step": _last_step(view),
        "speed": f"{view.samples_per_second:.1f} samples/s, {view.tokens_per_second:.0f} tokens/s",
        "rollouts": ", ".join(filter(None, (_rollouts(view), _longest(view)))),
        "answers": _answers(view),
        "attention": "; ".join(_problems(view)),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column()
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(one_line(value), style="yellow" * (name == "attention")))
    return grid


def _reward(view: RunView) -> str:
    if not view.rewards:
        return ""
    last = view.rewards[-MEAN_STEPS:]
    mean = f", mean of the last {len(last)} steps {sum(last) / len(last):.3f}"
    return f"{last[-1]:.3f}" + mean * (len(last) > 1)


def _last_step(view: RunView) -> str:
    if not view.steps:
        return ""
    step = view.steps[-1]
    seconds = step.get("seconds", {})
    waited, published = seconds.get("wait_samples", 0.0), seconds.get("publish", 0.0)
    trained = sum(seconds.values()) - waited - published
    return (
        f"waited {waited:.1f} s, trained {trained:.1f} s, published {published:.1f} s; "
        f"staleness {mean_staleness(step):.2f}"
    )


def _rollouts(view: RunView) -> str:
    if view.progress is None:
        return ""
    progress = view.progress
    counts = {
        status: progress.records.get(status, 0) + progress.eval_records.get(status, 0)
        for status in ("running", "finished", "scored")
    }
    waiting = f"{counts['finished']} waiting for a score, " if counts["finished"] else ""
    return f"{counts['running']} running, {waiting}{counts['scored']} scored"


def _answers(view: RunView) -> str:
    """Return what the last answers look like."""
    recent = view.sampling.recent
    if recent is None:
        return ""
    without = share(recent.num_without_answer, recent.num_answers)
    return (
        f"last {recent.num_answers}: reward {recent.mean_score:.3f}, {without} without an answer; "
        f"{recent.lengths(view.max_new_tokens)}"
    )


def _longest(view: RunView) -> str:
    """Return the rollout that has been running for longest, if that is long."""
    longest = view.sampling.longest
    if longest is None or longest.seconds < _LONG_SECONDS:
        return ""
    return (
        f"the longest {longest.record_id} for {duration(longest.seconds)} "
        f"({counted(longest.num_turns, 'turn')}, {longest.num_output_tokens} tokens so far)"
    )


def _problems(view: RunView) -> list[str]:
    """Return the current problems in short; the console has already printed each in full."""
    problems = []
    if view.lacks_signal and view.progress is not None:
        problems.append(
            f"no learning signal yet in {view.progress.num_groups_consumed} groups: equal scores"
        )
    if view.progress is not None and view.phase == "sampling":
        problems += map(str, view.progress.untaught)
        if view.progress.server_problem:
            problems.append(f"no server is in service: {view.progress.server_problem}")
    if view.missing is not None:
        missing = view.missing
        if missing.num_unscorable:
            problems.append(
                f"no score for {counted(missing.num_unscorable, 'record')}: the scorer fails"
            )
        if missing.num_waiting:
            problems.append(f"no score yet for {counted(missing.num_waiting, 'record')}: retrying")
        if missing.num_failed:
            problems.append(f"{counted(missing.num_failed, 'record')} failed")
    if view.restarts:
        names = ", ".join(f"{name} {count}" for name, count in view.restarts.items())
        problems.append(f"restarts: {names}")
    return problems


def _evaluation_text(evaluation: EvaluationStanding) -> str:
    if evaluation.num_completed < evaluation.num_tasks:
        return f"version {_questions(evaluation)}"
    score = "no scores" if evaluation.mean_score is None else f"{evaluation.mean_score:.3f}"
    return f"{score} at version {evaluation.version}"


def _questions(evaluation: EvaluationStanding) -> str:
    return f"{evaluation.version}: {evaluation.num_completed} of {evaluation.num_tasks} questions"


def _ready_groups(view: RunView, progress: RunProgress) -> str:
    dropped = view.sampling.num_dropped
    ready = f"{progress.num_groups_ready} of {progress.groups_per_step} groups ready"
    return f"{ready}, {dropped} dropped" if dropped else ready


def _last_steps(view: RunView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2))
    for column in ("step", "reward", "loss", "seconds", "waited", "staleness", "groups", "tokens"):
        table.add_column(column, justify="right")
    for step in view.steps[-_TABLE_STEPS:]:
        seconds = step.get("seconds", {})
        table.add_row(
            str(step["step"]),
            _figure(step.get("reward_mean")),
            _figure(step.get("loss")),
            f"{sum(seconds.values()):.1f}",
            f"{seconds.get('wait_samples', 0.0):.1f}",
            f"{mean_staleness(step):.2f}",
            str(step["num_groups"]),
            str(step["num_trained_tokens"]),
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _curve(rewards: Sequence[float]) -> str:
    """Return the rewards as a line of bars on a scale from 0 to 1, or wider if rewards exceed it."""
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    top = len(_BARS) - 1
    return "".join(_BARS[round((reward - low) / (high - low) * top)] for reward in rewards)

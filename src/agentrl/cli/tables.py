"""Views of the store as tables for a terminal.

In go values that the store returns, out come rich renderables. Text from outside is never read as
markup and cannot steer the terminal. This module asks the store nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl.launcher.display import Rates
from agentrl.runtime.printable import printable
from agentrl.store.repositories.lineage import RecordLineage, StepLineage
from agentrl.store.repositories.reports import Failure, Liveness, RunOverview

ALIVE_SECONDS = 15.0
"""A process that has not reported for longer is shown as silent."""


def figure(value: float | None) -> str:
    """Return a figure with three digits after the point, `-` for none."""
    return "-" if value is None else f"{value:.3f}"


def since(seconds: float) -> str:
    """Return a length of time in the unit that fits."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def runs_page(runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of runs."""
    if not runs:
        return Text("no runs here")
    table = _table("run", "status", ">version", ">groups", ">reward", ">tokens", "changed", "at")
    for run in runs:
        _row(
            table,
            run["name"],
            run["status"],
            str(run["policy_version"]),
            f"{run['num_groups_completed']}/{run['num_groups']}",
            figure(run["mean_score"]),
            str(run["num_output_tokens"]),
            f"{datetime.fromisoformat(run['updated_at']):%Y-%m-%d %H:%M}",
            Text(run["uri"], overflow="fold"),
        )
    return table


def progress_page(view: RunOverview, rates: Rates | None = None) -> RenderableType:
    """Return the run's standing, and who works on it."""
    summary, progress = view.summary, view.progress
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    grid.add_row("status", f"{summary.status}, policy version {summary.policy_version}")
    grid.add_row(
        "groups",
        f"{progress.num_groups_completed} of {progress.num_groups} complete, "
        f"{progress.num_groups_consumed} consumed, {progress.num_groups_ready} ready, "
        f"{progress.admitted_groups} admitted",
    )
    grid.add_row("training", _counts(progress.records))
    if progress.eval_records:
        grid.add_row("evaluation", _counts(progress.eval_records))
    grid.add_row("reward", f"{figure(summary.mean_score)} (mean of all scored training records)")
    grid.add_row("tokens", f"{progress.num_output_tokens} sampled")
    if rates is not None:
        grid.add_row("rate", f"{rates.samples:.1f} samples/s, {rates.tokens:.0f} tokens/s")
    title = f"run {summary.name}"
    return Group(
        Panel(grid, title=title, title_align="left"),
        servers_page(view.processes),
        samplers_page(view.processes),
    )


def progress_line(view: RunOverview) -> str:
    """Return the run's standing as one line, where there is no terminal."""
    progress = view.progress
    return (
        f"{view.summary.status}  version {progress.policy_version}  "
        f"groups {progress.num_groups_completed}/{progress.num_groups}  "
        f"{_counts(progress.records)}  reward {figure(view.summary.mean_score)}  "
        f"tokens {progress.num_output_tokens}"
    )


def servers_page(found: Liveness) -> RenderableType:
    """Return the table of inference servers."""
    if not found.services:
        return Text("no inference server ever registered")
    table = _table(
        *("server", "status", ">version", ">running", ">waiting", ">cache"),
        *("heartbeat", "address", "error"),
    )
    for service in found.services:
        load = service.load
        _row(
            table,
            service.id,
            service.status,
            str(service.policy_version),
            "" if load is None else str(load.num_running),
            "" if load is None else str(load.num_waiting),
            "" if load is None else f"{load.token_usage:.0%}",
            _heartbeat(found.now, service.heartbeat_at),
            service.base_url,
            printable(service.error or "", 80),
        )
    return table


def samplers_page(found: Liveness) -> RenderableType:
    """Return the table of samplers."""
    if not found.samplers:
        return Text("no sampler ever registered")
    table = _table(
        "sampler", "status", ">running", ">finished", ">tokens", "heartbeat", "idle seconds"
    )
    for sampler in found.samplers:
        waits = {why: f"{spent:.0f}" for why, spent in sampler.seconds_waiting.items() if spent}
        _row(
            table,
            sampler.id,
            sampler.status,
            str(sampler.num_running),
            str(sampler.num_finished),
            str(sampler.num_output_tokens),
            "" if sampler.status == "stopped" else _heartbeat(found.now, sampler.heartbeat_at),
            ", ".join(f"{why} {spent}" for why, spent in waits.items()),
        )
    return table


def failures_page(failures: Sequence[Failure]) -> RenderableType:
    """Return the table of what went wrong."""
    if not failures:
        return Text("no failures")
    table = _table("record", "status", ">attempts", ">bad", "last error", "held by")
    for failure in failures:
        _row(
            table,
            failure.record_id,
            failure.status,
            str(failure.num_attempts),
            str(failure.num_failed_attempts),
            printable(failure.last_error or failure.error or "", 200),
            failure.owner or "",
        )
    return table


def step_page(step: StepLineage) -> RenderableType:
    """Return the records behind one optimizer step."""
    policy = step.policy
    lines = Text(f"step {step.step} of {step.consumer}: ")
    lines.append(
        f"version {policy.version} in {policy.path}, sha256 {(policy.checksum or 'not yet known')[:16]}, "
        f"{policy.num_bytes} bytes"
        if policy is not None
        else "its weights are not published (any more)"
    )
    table = _table(
        "record", "standing", ">reward", "scorer", "question", ">turns", "tools", ">ratio", "masked"
    )
    for record in step.trained:
        _row(table, *_lineage_row(record, step, "trained"))
    for record in step.dropped:
        entry = record.ledger[step.consumer]
        _row(table, *_lineage_row(record, step, f"dropped: {entry.reason}"))
    return Group(lines, table)


def _lineage_row(record: RecordLineage, step: StepLineage, standing: str) -> list[str]:
    trainings = [training for turn in record.turns for training in turn.trainings]
    ratios = [t.ratio.mean * t.num_tokens for t in trainings if t.ratio is not None]
    num_tokens = sum(t.num_tokens for t in trainings if t.ratio is not None)
    masked: dict[str, int] = {}
    for training in trainings:
        for why, count in training.masked.items():
            masked[why] = masked.get(why, 0) + count
    calls = [call.name for turn in record.turns for call in turn.tool_calls]
    entry = record.ledger[step.consumer]
    if standing == "trained" and entry.status == "reserved":
        standing = "reserved, not yet in a checkpoint"
    return [
        record.record_id,
        standing,
        figure(record.score),
        f"{record.scorer} {record.scorer_version}" if record.scorer else "-",
        record.task_version + (" (edited since)" if record.task_changed else ""),
        str(len(record.turns)),
        ", ".join(calls),
        figure(sum(ratios) / num_tokens if num_tokens else None),
        ", ".join(f"{why} {count}" for why, count in sorted(masked.items())),
    ]


def _table(*columns: str) -> Table:
    """Return a table; a column that begins with ">" is set to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    return table


def _row(table: Table, *cells: str | Text) -> None:
    """Add a row; text from outside is never read as markup."""
    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing yet"


def _heartbeat(now: datetime, at: datetime) -> Text:
    seconds = (now - at).total_seconds()
    if seconds <= ALIVE_SECONDS:
        return Text(since(seconds))
    return Text(f"silent for {since(seconds)}", style="red")

"""Views of the store as pages for a terminal.

Input: values from the store. Output: rich renderables. This module does not access the store.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from agentrl.launcher.console.progress_display import Rates
from agentrl.launcher.console.run_panel import duration
from agentrl.plugins.inspector.lines import Rows, heading, labeled, whole
from agentrl.runtime.printable import printable
from agentrl.runtime.telemetry.figure_words import STEP_FIGURES
from agentrl.schema import Record
from agentrl.schema.audit import AuditEntry
from agentrl.store.views.lineage import CreditedTurn, RecordLineage, StepLineage
from agentrl.store.views.reports import Failure, Liveness, RunOverview
from agentrl.store.views.run_counts import MEAN_OF

ALIVE_SECONDS = 15.0
"""A process that has not reported for longer is shown as silent."""
ANSWER_CHARS = 100


def figure(value: float | None) -> str:
    """Return a figure with three decimal places; `-` for None."""
    return "-" if value is None else f"{value:.3f}"


def runs_page(runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of runs; `at` is a database address, or the command that opens it."""
    if not runs:
        return Text("no runs")
    table = Rows("run", "status", ">version", ">groups", ">reward", ">tokens", "changed", "+at")
    for run in runs:
        table.add(
            run["name"],
            run["status"],
            str(run["policy_version"]),
            f"{run['num_groups_completed']}/{run['num_groups']}",
            figure(run["mean_score"]),
            str(run["num_output_tokens"]),
            f"{datetime.fromisoformat(run['updated_at']):%Y-%m-%d %H:%M}",
            run["uri"] if run["opened_by"] is None else run["opened_by"],
        )
    return table


def progress_page(view: RunOverview, rates: Rates | None = None) -> RenderableType:
    """Return the run's state, and the processes that work on it."""
    summary, progress = view.summary, view.progress
    phase = f" ({summary.phase})" if summary.phase and summary.status == "training" else ""
    rows = {
        "status": f"{summary.status}{phase}, policy version {summary.policy_version}",
        "groups": f"{progress.num_groups_completed} of {progress.num_groups} complete, "
        f"{progress.num_groups_consumed} consumed, {progress.num_groups_ready} ready, "
        f"{progress.admitted_groups} admitted",
        "training": _counts_text(progress.records),
        "evaluation": _counts_text(progress.eval_records) if progress.eval_records else "",
        "reward": f"{figure(summary.mean_score)} (mean of the last {MEAN_OF:,} scored training records)",
        "tokens": f"{progress.num_output_tokens} sampled",
        "rate": ""
        if rates is None
        else f"{rates.samples:.1f} samples/s, {rates.tokens:.0f} tokens/s",
    }
    return Group(
        heading(f"run {summary.name}"),
        *(labeled(name, text) for name, text in rows.items() if text),
        *(labeled("waits", str(one)) for one in progress.untaught),
        Text(""),
        servers_page(view.processes),
        Text(""),
        samplers_page(view.processes),
    )


def progress_line(view: RunOverview) -> str:
    """Return the run's progress as one line, for output without a terminal."""
    progress = view.progress
    waits = "".join(f"  {one}" for one in progress.untaught)
    return (
        f"{view.summary.status}  version {progress.policy_version}  "
        f"groups {progress.num_groups_completed}/{progress.num_groups}  "
        f"{_counts_text(progress.records)}  reward {figure(view.summary.mean_score)}  "
        f"tokens {progress.num_output_tokens}{waits}"
    )


def servers_page(found: Liveness) -> RenderableType:
    """Return the table of inference servers."""
    if not found.services:
        return Text("no inference server has registered")
    table = Rows(
        *("server", "status", ">version", ">running", ">waiting", ">cache"),
        *("heartbeat", "+address", "+error"),
    )
    for service in found.services:
        load = service.load
        table.add(
            service.id,
            service.status,
            str(service.policy_version),
            "" if load is None else str(load.num_running),
            "" if load is None else str(load.num_waiting),
            "" if load is None else f"{load.token_usage:.0%}",
            _heartbeat(found.now, service.heartbeat_at),
            service.base_url,
            printable(service.error or "", 200),
        )
    return table


def samplers_page(found: Liveness) -> RenderableType:
    """Return the table of samplers."""
    if not found.samplers:
        return Text("no sampler has registered")
    table = Rows(
        *("sampler", "release", "status", ">running", ">finished", ">tokens", "heartbeat"),
        "+idle seconds",
    )
    for sampler in found.samplers:
        waits = {why: f"{spent:.0f}" for why, spent in sampler.seconds_waiting.items() if spent}
        table.add(
            sampler.id,
            printable(sampler.release, 40),
            "cordoned" if sampler.cordoned_by and sampler.status == "sampling" else sampler.status,
            str(sampler.num_running),
            str(sampler.num_finished),
            str(sampler.num_output_tokens),
            "" if sampler.status == "stopped" else _heartbeat(found.now, sampler.heartbeat_at),
            ", ".join(f"{why} {spent}" for why, spent in waits.items()),
        )
    if not found.mixed_releases:
        return table
    return Group(table, Text(f"warning: {printable(found.mixed_releases)}"))


def audit_page(entries: Sequence[AuditEntry]) -> RenderableType:
    """Return the table of the changes that people made."""
    if not entries:
        return Text("nobody has changed the run")
    table = Rows("time (UTC)", "what", "by", "+details")
    for entry in entries:
        details = json.dumps(entry.details, ensure_ascii=False, default=str)
        table.add(
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.what,
            printable(entry.by, 100),
            printable(details, 300),
        )
    return table


def failures_page(failures: Sequence[Failure]) -> RenderableType:
    """Return the table of failures."""
    if not failures:
        return Text("no failures")
    table = Rows("record", "status", ">attempts", ">failed", "+last error", "+owner")
    for failure in failures:
        table.add(
            failure.record_id,
            failure.status,
            str(failure.num_attempts),
            str(failure.num_failed_attempts),
            printable(failure.last_error or failure.error or "", 200),
            failure.owner or "",
        )
    return table


def records_page(records: Sequence[Record], limit: int) -> RenderableType:
    """Return the table of records; the last line mentions further ones."""
    if not records:
        return Text("no record matches")
    table = Rows(
        *("record", "status", ">score", "outcome", "versions", ">tokens", ">calls"),
        "+answer",
    )
    for record in records:
        versions = (
            "" if record.min_version is None else f"{record.min_version}..{record.max_version}"
        )
        table.add(
            record.id,
            record.status,
            "-" if record.score is None else figure(record.score.value),
            record.outcome or "",
            versions,
            str(record.num_output_tokens),
            str(record.num_tool_calls),
            printable(record.final_answer or record.error or "", ANSWER_CHARS),
        )
    more = f"showing the first {limit}; --limit N shows more" if len(records) == limit else ""
    return Group(table, *[Text(more, style="dim")] * bool(more))


def turns_page(turns: Sequence[CreditedTurn]) -> RenderableType:
    """Return the table of trained turns with their credit."""
    if not turns:
        return Text("no turn was trained yet")
    table = Rows("record", ">turn", ">credit", ">step", "tools", "+reply")
    for turn in turns:
        table.add(
            turn.record_id,
            str(turn.index),
            figure(turn.credit),
            str(turn.step),
            ", ".join(dict.fromkeys(turn.tool_names)),
            printable(turn.output_text, ANSWER_CHARS),
        )
    return table


def decisions_page(decisions: Mapping[str, Any]) -> RenderableType:
    """Return the table of the turns after which the worth fell most."""
    if not decisions["rows"]:
        why = "no turn was trained after which the worth fell"
        chains = "the rollouts are chains, so no turn has a worth of its own (--rollouts tree)"
        return Text(why if decisions["has_branches"] else chains)
    table = Rows(
        *(">change", ">before", ">after", ">rollouts", ">credit", ">step", "record", ">turn"),
        *("+did", "+question"),
    )
    for row in decisions["rows"]:
        worth = row["worth"]
        table.add(
            *(figure(worth["change"]), figure(worth["after"] - worth["change"])),
            *(figure(worth["after"]), str(worth["num_leaves"]), figure(row["credit"])),
            *(str(row["step"]), row["record_id"], str(row["index"])),
            *(printable(row["text"], ANSWER_CHARS), printable(row["question"], ANSWER_CHARS)),
        )
    return table


def step_page(step: StepLineage, figures: Mapping[str, Any]) -> RenderableType:
    """Return the records behind one optimizer step, then its figures in words."""
    policy = step.policy
    lines = whole(Text(f"step {step.step} of {step.consumer}: "))
    lines.append(
        f"version {policy.version} in {policy.path}, sha256 "
        f"{(policy.checksum or 'not yet known')[:16]}, {policy.num_bytes} bytes"
        if policy is not None
        else "its weights are not published, or no longer available"
    )
    table = Rows(
        *("record", "standing", ">reward", "+scorer", "+task version"),
        *(">turns", "+tools", ">ratio", "+masked"),
    )
    for record in step.trained:
        table.add(*_lineage_row(record, step, "trained"))
    for record in step.dropped:
        entry = record.ledger[step.consumer]
        table.add(*_lineage_row(record, step, f"dropped: {entry.reason}"))
    return Group(lines, table, *((Text(""), _figures_table(figures)) if figures else ()))


def _figures_table(figures: Mapping[str, Any]) -> RenderableType:
    table = Rows("figure", ">value", "unit", "+meaning")
    for key, words in STEP_FIGURES.items():
        value = figures.get(key)
        if isinstance(value, int | float | str) and key not in ("step", "time"):
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add(words.name, text, words.unit, words.meaning)
    return table


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


def _counts_text(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing yet"


def _heartbeat(now: datetime, at: datetime) -> Text:
    seconds = (now - at).total_seconds()
    if seconds <= ALIVE_SECONDS:
        return Text(duration(seconds))
    return Text(f"silent for {duration(seconds)}", style="red")

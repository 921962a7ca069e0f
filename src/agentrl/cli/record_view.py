"""One record, turn by turn: as text for people, and as JSON values for programs."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.cli.tables import figure
from agentrl.runtime.printable import printable
from agentrl.schema import DispatchedSamplingTask, MCPTask, Record, TurnTraining
from agentrl.store.repositories.reports import RecordDetail

SHORT_CHARS = 600
"""Texts longer than this are cut unless `--full` is given."""
_ARRAYS = {"added_ids", "output_ids", "output_logprobs", "routed_experts"}


def record_json(detail: RecordDetail) -> dict[str, Any]:
    """Return the record as JSON values; token arrays are given by their lengths."""
    trainings = _trainings(detail)
    return {
        "record": detail.record.model_dump(mode="json"),
        "task": {"kind": detail.task.kind, **detail.task.model_dump(mode="json")},
        "attempt": detail.attempt,
        "turns": [
            {
                **turn.model_dump(mode="json", exclude=_ARRAYS),
                "num_added_tokens": len(turn.added_ids),
                "num_output_tokens": len(turn.output_ids),
                "mean_logprob": _mean_logprob(turn),
                "staleness": _staleness(turn, detail.policy_version),
                "trainings": [one.model_dump(mode="json") for one in trainings.get(turn.id, ())],
            }
            for turn in detail.turns
        ],
        "policy_version": detail.policy_version,
        "task_version": detail.lineage.task_version,
        "ledger": {
            consumer: entry.model_dump(mode="json")
            for consumer, entry in detail.lineage.ledger.items()
        },
    }


def record_page(detail: RecordDetail, *, full: bool = False) -> RenderableType:
    """Return the record as text for a terminal; texts are cut unless `full`."""
    limit = None if full else SHORT_CHARS
    trainings = _trainings(detail)
    turns = [
        part
        for turn in detail.turns
        for part in _turn(turn, detail.policy_version, trainings.get(turn.id, ()), limit)
    ]
    return Group(
        Panel(_head(detail), title=Text(f"record {detail.record.id}"), title_align="left"),
        _attempts(detail.record),
        *(turns or [Text(f"attempt {detail.attempt} has no turns")]),
    )


def _head(detail: RecordDetail) -> Table:
    record, task, lineage = detail.record, detail.task, detail.lineage
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        grid.add_row(name, Text(printable(value)))

    if isinstance(task, MCPTask):
        row("question", task.query)
        row("reference", "-" if task.answer is None else str(task.answer))
    row("answer", "-" if record.final_answer is None else record.final_answer)
    row("status", f"{record.status}, {record.outcome or 'no outcome'}")
    if record.score is not None:
        score = record.score
        row("reward", f"{figure(score.value)} by {score.scorer} {score.version} {score.detail}")
    else:
        row("reward", "not scored")
    versions = (
        "none" if record.min_version is None else f"{record.min_version}..{record.max_version}"
    )
    row("versions", f"{versions} (the run is at {detail.policy_version})")
    row(
        "tokens",
        f"{record.num_prompt_tokens} prompt, {record.num_output_tokens} sampled, "
        f"{record.num_tool_calls} tool call(s)",
    )
    for consumer, entry in lineage.ledger.items():
        steps = ", ".join(map(str, entry.trained_at))
        why = f" ({entry.reason})" if entry.reason else ""
        standing = f"{entry.status}{why} at step {entry.step}"
        row(consumer, standing + (f"; trained at {steps}" if steps else ""))
    if lineage.task_version:
        edited = ", edited since" if lineage.task_changed else ""
        row("question version", lineage.task_version + edited)
    if record.error:
        row("error", record.error)
    return grid


def _attempts(record: Record) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("attempt", "begun", "ended", "by", "held by", "error"):
        table.add_column(column, overflow="fold")
    for one in record.attempts:
        table.add_row(
            str(one.attempt),
            f"{one.started_at:%Y-%m-%d %H:%M:%S}",
            "" if one.ended_at is None else f"{one.ended_at:%H:%M:%S}",
            one.ended_by or "",
            one.owner,
            Text(printable(one.error or "")),
        )
    return table


def _turn(
    turn: DispatchedSamplingTask,
    policy_version: int,
    trainings: tuple[TurnTraining, ...],
    limit: int | None,
) -> Iterator[RenderableType]:
    versions = ", ".join(f"v{span.version}x{span.end - span.start}" for span in turn.version_spans)
    title = (
        f"turn {turn.index} · {len(turn.added_ids)} + {len(turn.output_ids)} tokens · "
        f"{versions or 'no version'} · {turn.finish_reason}"
    )
    behind = _staleness(turn, policy_version)
    if behind:
        title += f" · {behind} behind the run"
    if turn.branch_reason:
        title += f" · branches from turn {turn.parent}: {turn.branch_reason}"
    yield Rule(Text(title), align="left", style="dim")
    for message in turn.added_messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield _said(str(message.get("role", "?")), text, limit, "dim")
    yield _said("model", turn.output_text, limit, "bold")
    for call in turn.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        problem = f" (malformed: {call.format_error})" if call.format_error else ""
        yield _said("call", f"{call.name} {arguments}{problem}", limit, "cyan")
    for result in turn.tool_results:
        label = "tool error" if result.is_error else "result"
        yield _said(label, f"{result.content} ({result.seconds:.2f} s)", limit, "green")
    for training in trainings:
        yield _said("training", _training(training), None, "magenta")


def _training(training: TurnTraining) -> str:
    parts = [
        f"step {training.step} of {training.consumer}",
        f"{training.num_trained_tokens} of {training.num_tokens} tokens",
        f"{training.staleness} version(s) behind",
    ]
    if training.advantage is not None:
        parts.append(f"advantage {training.advantage:+.3f}")
    if training.ratio is not None:
        ratio = training.ratio
        parts.append(f"ratio {ratio.mean:.4f} ± {ratio.std:.4f} ({ratio.min:.4f}..{ratio.max:.4f})")
    if training.num_clipped_tokens:
        parts.append(f"{training.num_clipped_tokens} clipped")
    parts += [f"{count} masked: {why}" for why, count in training.masked.items()]
    return ", ".join(parts)


def _said(who: str, text: str, limit: int | None, style: str) -> RenderableType:
    line = Text(f"{who:>10}  ", style=style)
    line.append(printable(text, limit), style="default not bold")
    return line


def _staleness(turn: DispatchedSamplingTask, policy_version: int) -> int | None:
    versions = [span.version for span in turn.version_spans]
    return policy_version - min(versions) if versions else None


def _mean_logprob(turn: DispatchedSamplingTask) -> float | None:
    return float(np.mean(turn.output_logprobs)) if len(turn.output_logprobs) else None


def _trainings(detail: RecordDetail) -> dict[str, tuple[TurnTraining, ...]]:
    return {turn.id: turn.trainings for turn in detail.lineage.turns}

"""One record, turn by turn: as text for people, and as JSON values for programs."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from agentrl.plugins.inspector.lines import Rows, heading, labeled, whole
from agentrl.plugins.inspector.tables import figure
from agentrl.runtime.printable import one_line
from agentrl.schema import DispatchedSamplingTask, MCPTask, Record, Seat, TurnTraining
from agentrl.store.views.reports import RecordDetail

SHORT_CHARS = 600
"""Texts longer than this are cut unless `--full` is given."""
_ARRAYS = {"added_ids", "output_ids", "output_logprobs", "routed_experts"}


def record_json(detail: RecordDetail, *, full: bool = False) -> dict[str, Any]:
    """Return the record as JSON values; token arrays are given by their lengths unless `full`."""
    trainings = _trainings(detail)
    return {
        "record": detail.record.model_dump(mode="json"),
        "task": {"kind": detail.task.kind, **detail.task.model_dump(mode="json")},
        "attempt": detail.attempt,
        "turns": [
            {
                **turn.model_dump(mode="json", exclude=_ARRAYS),
                **(_arrays(turn) if full else {}),
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


def _arrays(turn: DispatchedSamplingTask) -> dict[str, list[float]]:
    return {
        "added_ids": turn.added_ids.tolist(),
        "output_ids": turn.output_ids.tolist(),
        "output_logprobs": turn.output_logprobs.tolist(),
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
        heading(f"record {detail.record.id}"),
        *_head(detail),
        Text(""),
        _attempts(detail.record),
        *(turns or [Text(_why_no_turns(detail))]),
    )


def _why_no_turns(detail: RecordDetail) -> str:
    expired_at = detail.record.expired_at
    if expired_at is None:
        return f"attempt {detail.attempt} has no turns"
    return f"its turns expired on {expired_at:%Y-%m-%d} (--retain_steps)"


def _head(detail: RecordDetail) -> list[Text]:
    record, task, lineage = detail.record, detail.task, detail.lineage
    rows: list[Text] = []

    def row(name: str, value: str) -> None:
        rows.append(labeled(name, value))

    if isinstance(task, MCPTask):
        row("question", task.query)
        row("reference", "-" if task.answer is None else str(task.answer))
        if task.columns:
            row("columns", json.dumps(task.columns, ensure_ascii=False))
    if (start := task.start) is not None:
        row("starts at", f"turn {start.turn} of {start.record_id} of {start.run}")
    row("answer", "-" if record.final_answer is None else record.final_answer)
    row("status", f"{record.status}, {record.outcome or 'no outcome'}")
    if record.score is not None:
        score = record.score
        row("reward", f"{figure(score.value)} by {score.scorer} {score.version} {score.detail}")
    else:
        row("reward", "not scored")
    metrics = {**record.metrics, **({} if record.score is None else record.score.parts)}
    if metrics:
        row("metrics", ", ".join(f"{name} {figure(value)}" for name, value in metrics.items()))
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
        reason = f" ({entry.reason})" if entry.reason else ""
        status = f"{entry.status}{reason} at step {entry.step}"
        row(consumer, status + (f"; trained at {steps}" if steps else ""))
    if lineage.task_version:
        edited = ", edited since" if lineage.task_changed else ""
        row("task version", lineage.task_version + edited)
    if record.error:
        row("error", record.error)
    return rows


def _attempts(record: Record) -> RenderableType:
    table = Rows("attempt", "started", "ended", "ended by", "+owner", "+error")
    for attempt in record.attempts:
        table.add(
            str(attempt.attempt),
            f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
            "" if attempt.ended_at is None else f"{attempt.ended_at:%H:%M:%S}",
            attempt.ended_by or "",
            attempt.owner,
            attempt.error or "",
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
    staleness = _staleness(turn, policy_version)
    if staleness:
        title += f" · {staleness} behind the run"
    if turn.seat is not None:
        title += f" · {_seat(turn.seat)}"
    if turn.reward is not None:
        title += f" · reward {figure(turn.reward)}"
    if turn.branch_reason:
        title += f" · branches from turn {turn.parent}: {turn.branch_reason}"
    yield Text("")
    yield whole(Text(one_line(title), style="dim"))
    if limit is None:
        yield from _full_inputs(turn)
    for message in turn.added_messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield labeled(str(message.get("role", "?")), text, "dim", limit)
    yield labeled("model", turn.output_text, "bold", limit)
    for call in turn.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        problem = f" (malformed: {call.format_error})" if call.format_error else ""
        yield labeled("call", f"{call.name} {arguments}{problem}", "cyan", limit)
    for result in turn.tool_results:
        label = "tool error" if result.is_error else "result"
        yield labeled(label, f"{result.content} ({result.seconds:.2f} s)", "green", limit)
    for training in trainings:
        yield labeled("training", _training(training), "magenta")


def _seat(seat: Seat) -> str:
    text = f"seat {seat.name}"
    if seat.stint:
        text += f", stint {seat.stint}"
    if not seat.trained:
        return f"{text}, not trained"
    return text if seat.reward is None else f"{text} earned {figure(seat.reward)}"


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


def _full_inputs(turn: DispatchedSamplingTask) -> Iterator[RenderableType]:
    """Yield the model's exact input and output: tool schemas and tokens."""
    for tool in turn.tools:
        yield labeled("tool", json.dumps(tool, ensure_ascii=False))
    yield labeled("added ids", " ".join(map(str, turn.added_ids.tolist())))
    yield labeled("sampled ids", " ".join(map(str, turn.output_ids.tolist())))
    yield labeled("logprobs", " ".join(f"{one:.4f}" for one in turn.output_logprobs.tolist()))


def _staleness(turn: DispatchedSamplingTask, policy_version: int) -> int | None:
    versions = [span.version for span in turn.version_spans]
    return policy_version - min(versions) if versions else None


def _mean_logprob(turn: DispatchedSamplingTask) -> float | None:
    return float(np.mean(turn.output_logprobs)) if len(turn.output_logprobs) else None


def _trainings(detail: RecordDetail) -> dict[str, tuple[TurnTraining, ...]]:
    return {turn.id: turn.trainings for turn in detail.lineage.turns}

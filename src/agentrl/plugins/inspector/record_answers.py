"""One record as JSON values: its turns, tokens and texts, each limited to the size of a page.

Input: a `RecordDetail` or a turn. Output: dictionaries. A truncated text states its length, and
`whole_text` returns any range of it. Data that a run does not store is absent, never guessed.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentrl.errors import StoreError
from agentrl.plugins.inspector.token_texts import token_texts
from agentrl.schema import (
    TOKEN_USES,
    DispatchedSamplingTask,
    Score,
    TokenTrainings,
    TurnTraining,
    token_versions,
)
from agentrl.store.views.reports import RecordDetail

SHOWN_CHARS = 20_000
"""Characters of a text that the page contains initially."""
MORE_CHARS = 200_000
"""Characters that a request for the rest returns."""
TURNS_A_PAGE = 100
TOKENS_A_PAGE = 8192
_SEPARATE_FIELDS = {"attempts", "turns", "score", "more_scores", "final_answer", "error"}
_TURN_FIELDS = {
    *("id", "index", "parent", "branch_reason", "finish_reason", "server", "model", "trainable"),
    *("started_at", "finished_at", "version_spans", "cached_tokens", "num_retractions"),
    *("reward", "advantage", "sampling_params", "shared_len", "seat"),
}


def record_answer(detail: RecordDetail, start: int) -> dict[str, Any]:
    """Return a record with its turns from `start` on."""
    record, lineage = detail.record, detail.lineage
    trainings = {turn.id: turn.trainings for turn in lineage.turns}
    shown = detail.turns[start : start + TURNS_A_PAGE]
    end = start + len(shown)
    return {
        "record": {
            **record.model_dump(mode="json", exclude=_SEPARATE_FIELDS),
            "final_answer": cut(record.final_answer),
            "error": cut(record.error),
            "score": _score(record.score),
            "more_scores": [_score(score) for score in record.more_scores],
            "attempts": [
                {**one.model_dump(mode="json", exclude={"error"}), "error": cut(one.error)}
                for one in record.attempts
            ],
        },
        "task": _task(detail),
        "attempt": detail.attempt,
        "policy_version": detail.policy_version,
        "task_version": lineage.task_version,
        "task_changed": lineage.task_changed,
        "ledger": {name: one.model_dump(mode="json") for name, one in lineage.ledger.items()},
        "num_turns": len(detail.turns),
        "start": start,
        "next": end if end < len(detail.turns) else None,
        "turns": [_turn(turn, trainings.get(turn.id, ())) for turn in shown],
    }


def _task(detail: RecordDetail) -> dict[str, Any]:
    fields = detail.task.model_dump(mode="json", exclude={"group_scores"})
    texts = {name: cut(value) for name, value in fields.items() if isinstance(value, str)}
    plain = ("id", "split", "status", "kind", "scorer", "tag", "created_at", "completed_at")
    answer = fields.get("answer")
    return {
        **fields,
        **{name: text for name, text in texts.items() if name not in plain},
        "kind": detail.task.kind,
        "answer": cut(answer if isinstance(answer, str) or answer is None else _json(answer)),
        "aug_answers": cut(_json(fields.get("aug_answers", []))),
        "columns": cut(_json(fields["columns"])) if fields.get("columns") else None,
    }


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    fields = score.model_dump(mode="json", exclude={"inputs", "detail"})
    return {**fields, "detail": cut(score.detail), "inputs": cut(_json(score.inputs))}


def _turn(turn: DispatchedSamplingTask, trainings: Sequence[TurnTraining]) -> dict[str, Any]:
    logprobs = turn.output_logprobs
    return {
        **turn.model_dump(mode="json", include=_TURN_FIELDS),
        "messages": [
            {"role": str(message.get("role", "?")), **_content(message, f"message.{number}")}
            for number, message in enumerate(turn.added_messages)
        ],
        "tools": [_tool(tool, number) for number, tool in enumerate(turn.tools)],
        "output": cut(turn.output_text, "output"),
        "calls": [
            {
                "id": call.id,
                "name": call.name,
                "arguments": cut(_json(call.arguments), f"arguments.{number}"),
                "format_error": call.format_error,
            }
            for number, call in enumerate(turn.tool_calls)
        ],
        "results": [
            {
                **result.model_dump(mode="json", exclude={"content"}),
                "content": cut(result.content, f"result.{number}"),
            }
            for number, result in enumerate(turn.tool_results)
        ],
        "num_added": len(turn.added_ids),
        "num_output": len(turn.output_ids),
        "mean_logprob": float(np.mean(logprobs)) if len(logprobs) else None,
        "trainings": [one.model_dump(mode="json", exclude={"tokens"}) for one in trainings],
    }


def _content(message: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a message's text, its images and its other fields."""
    content = message.get("content")
    images: list[str] = []
    for one in content if isinstance(content, list) else ():
        if isinstance(one, dict) and one.get("type") == "image_url":
            url = one.get("image_url")
            images.append(str(url.get("url", "") if isinstance(url, dict) else url))
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {
        "content": cut(_message_text(message), part),
        "images": images,
        "rest": cut(_json(rest)) if rest else None,
    }


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _json(content)
    texts = [
        str(one.get("text", "")) if one.get("type") == "text" else _json(one)
        for one in content
        if isinstance(one, dict) and one.get("type") != "image_url"
    ]
    return "\n".join(texts)


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "name": str(function.get("name", "?")),
        "description": cut(str(function.get("description", ""))),
        "schema": cut(_json(function.get("parameters", {})), f"schema.{number}"),
    }


def whole_text(turn: DispatchedSamplingTask, part: str, start: int) -> dict[str, Any]:
    """Return a further part of a text that `record_answer` cut."""
    kind, _, digits = part.partition(".")
    number = int(digits[:9]) if digits.isdecimal() else 0
    try:
        if kind == "output":
            text = turn.output_text
        elif kind == "message":
            text = _message_text(turn.added_messages[number])
        elif kind == "arguments":
            text = _json(turn.tool_calls[number].arguments)
        elif kind == "result":
            text = turn.tool_results[number].content
        else:
            tool = turn.tools[number]
            text = _json(tool.get("function", tool).get("parameters", {}))
    except IndexError:
        raise StoreError(f"turn {turn.id} has no text {part!r}") from None
    return {"text": text[start : start + MORE_CHARS], "start": start, "length": len(text)}


def tokens_answer(
    turn: DispatchedSamplingTask,
    seen: TokenTrainings | None,
    tokenizer: Tokenizer | None,
    start: int,
) -> dict[str, Any]:
    """Return sampled tokens with their stored values.

    Args:
        turn: the turn that sampled them.
        seen: values at the turn's tokens in the last step that used it; None before the first.
        tokenizer: turns ids into texts; None leaves the texts out.
        start: tokens to leave out.
    """
    end = min(start + TOKENS_A_PAGE, len(turn.output_ids))
    ids = turn.output_ids[start:end]
    trained = None
    if seen is not None:
        uses = np.frombuffer(seen.uses, np.uint8)[start:end]
        trained = {
            "ratios": np.exp(_from_float16(seen.log_ratios)[start:end]).round(4).tolist(),
            "entropies": _from_float16(seen.entropies)[start:end].round(4).tolist() or None,
            "uses": [TOKEN_USES[use] for use in uses],
        }
    return {
        "start": start,
        "length": len(turn.output_ids),
        "ids": ids.tolist(),
        "texts": None if tokenizer is None else token_texts(tokenizer, ids.tolist()),
        "logprobs": [round(float(one), 4) for one in turn.output_logprobs[start:end]],
        "versions": token_versions(turn)[start:end].tolist(),
        "trained": trained,
    }


def _from_float16(stored: bytes) -> np.ndarray:
    return np.frombuffer(stored, "<f2").astype(np.float64)


def cut(text: str | None, part: str | None = None) -> dict[str, Any] | None:
    """Return the start of a text, its length, and the name for requesting the rest."""
    if text is None:
        return None
    shown = {"text": text[:SHOWN_CHARS], "length": len(text)}
    return shown if part is None else {**shown, "part": part}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)

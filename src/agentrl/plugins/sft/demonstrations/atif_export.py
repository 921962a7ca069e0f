"""Ended attempts of a run as Harbor's trajectories (ATIF 1.8), one JSONL file per split.

Input: a store. Output: one document per attempt. Its steps are the attempt's first conversation;
each further one (a branch, a rewritten context, a second agent) is an embedded trajectory, in which
steps that already occur in another one are marked as copied context. A step of the policy carries
the ids of prompt and completion, and their logprobs.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from agentrl.errors import ConfigError
from agentrl.plugins.sft.demonstrations.atif_documents import OURS, VERSION
from agentrl.plugins.sft.demonstrations.conversations import assistant_message, paths_of
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Message,
    Record,
    Task,
    ToolCall,
    ToolResult,
    rebuild_images,
    rebuild_prompts,
)
from agentrl.schema.image import shown_text
from agentrl.store import TrajectoryStore


async def export_trajectories(store: TrajectoryStore, folder: Path) -> dict[str, int]:
    """Write the ended attempts of a run; return how many each split has.

    Args:
        store: the run.
        folder: output folder, which must not exist.

    Raises:
        ConfigError: the folder exists.
        WriteError: the folder cannot be written.
    """
    if await asyncio.to_thread(folder.exists):
        raise ConfigError(f"{folder} already exists; choose a new folder")
    counts: dict[str, int] = {}
    model = store.database_name
    with atomic_directory(folder) as staging, ExitStack() as stack:
        files: dict[str, TextIO] = {}
        async for record in store.records.find():
            if record.outcome is None:
                continue
            task = await store.tasks.get(record.task_id)
            turns = await store.turns.of_record(record.id)
            document = trajectory_of(record, task, turns, model)
            if not document:
                continue
            if record.split not in files:
                path = staging / f"{record.split}.jsonl"
                files[record.split] = stack.enter_context(path.open("w", encoding="utf-8"))
            files[record.split].write(json.dumps(document, ensure_ascii=False) + "\n")
            counts[record.split] = counts.get(record.split, 0) + 1
    return counts


def trajectory_of(
    record: Record, task: Task | None, turns: Sequence[DispatchedSamplingTask], model: str
) -> dict[str, Any]:
    """Return an attempt as a document.

    Args:
        record: the attempt.
        task: the question.
        turns: all turns of the attempt, in order of `index` from 0.
        model: name of the policy.
    """
    prompts, images = rebuild_prompts(turns), rebuild_images(turns)
    exported: set[int] = set()
    documents = []
    for number, (path, tools) in enumerate(paths_of(turns)):
        steps: list[dict[str, Any]] = []
        for turn in path:
            for message in turn.added_messages:
                _add_context(steps, message)
            step = _policy_step(turn, tools, prompts[turn.index], turn.index in exported)
            step["extra"][OURS]["num_images"] = len(images[turn.index])
            steps.append(step)
            exported.add(turn.index)
        for step_id, step in enumerate(steps, start=1):
            step["step_id"] = step_id
        agent: dict[str, Any] = {"name": "agentrl", "version": "1", "model_name": model}
        if tools:
            agent["tool_definitions"] = tools
        documents.append(
            {
                "schema_version": VERSION,
                "session_id": record.id,
                "trajectory_id": record.id if number == 0 else f"{record.id}#{number}",
                "agent": agent,
                "steps": steps,
            }
        )
    if not documents:
        return {}
    root, *embedded = documents
    root["final_metrics"] = {
        "total_prompt_tokens": sum(map(len, prompts)),
        "total_completion_tokens": sum(len(turn.output_ids) for turn in turns),
        "total_steps": len(root["steps"]),
    }
    root["extra"] = {OURS: _facts(record, task)}
    if embedded:
        root["subagent_trajectories"] = embedded
        root["notes"] = "Embedded trajectories are further contexts of the same attempt."
    return root


def _policy_step(
    turn: DispatchedSamplingTask,
    tools: Sequence[dict[str, Any]],
    prompt: np.ndarray,
    is_copy: bool,
) -> dict[str, Any]:
    message = assistant_message(turn, tools)
    step: dict[str, Any] = {
        "timestamp": turn.finished_at.isoformat(),
        "source": "agent",
        "message": message["content"],
        "llm_call_count": 1,
        "extra": {
            OURS: {
                "turn": turn.index,
                "parent": turn.parent,
                "text": turn.output_text,
                "finish_reason": turn.finish_reason,
                "branch_reason": turn.branch_reason,
                "trainable": turn.trainable,
                "versions": [[span.version, span.start, span.end] for span in turn.version_spans],
                "sampling_params": turn.sampling_params.model_dump(mode="json"),
            }
        },
    }
    if "reasoning_content" in message:
        step["reasoning_content"] = message["reasoning_content"]
    if turn.tool_calls:
        step["tool_calls"] = [_call_document(call) for call in turn.tool_calls]
    if turn.tool_results:
        step["observation"] = {
            "results": [_result_document(result) for result in turn.tool_results]
        }
    if is_copy:
        step["is_copied_context"] = True
    elif turn.trainable:
        step["metrics"] = _metrics(turn, prompt)
    return step


def _metrics(turn: DispatchedSamplingTask, prompt: np.ndarray) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.output_ids),
        "cached_tokens": turn.cached_tokens,
        "prompt_token_ids": prompt.tolist(),
        "completion_token_ids": turn.output_ids.tolist(),
    }
    if np.isfinite(turn.output_logprobs).all():
        # Written as the shortest texts that restore these float32 values.
        metrics["logprobs"] = turn.output_logprobs.astype(float).tolist()
    return metrics


def _call_document(call: ToolCall) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tool_call_id": call.id,
        "function_name": call.name,
        "arguments": call.arguments,
    }
    if call.format_error:
        document["extra"] = {OURS: {"format_error": call.format_error}}
    return document


def _result_document(result: ToolResult) -> dict[str, Any]:
    content = result.content + "".join(f"\n[image {address}]" for address in result.images)
    document: dict[str, Any] = {"source_call_id": result.call_id, "content": content}
    if result.is_error:
        document["extra"] = {OURS: {"is_error": True}}
    return document


def _add_context(steps: list[dict[str, Any]], message: Message) -> None:
    """Append the new messages of a turn, as steps or as results of the previous step."""
    role = message.get("role")
    text = shown_text(message.get("content"))
    if role == "tool":
        previous = steps[-1] if steps else {}
        call_ids = {call["tool_call_id"] for call in previous.get("tool_calls", ())}
        result: dict[str, Any] = {"content": text}
        if message.get("tool_call_id") in call_ids:
            result["source_call_id"] = message["tool_call_id"]
        if not previous:
            previous = {"source": "system", "message": ""}
            steps.append(previous)
        previous.setdefault("observation", {"results": []})["results"].append(result)
        return
    if role != "assistant":
        source = "user" if role == "user" else "system"
        steps.append({"source": source, "message": text})
        return
    step: dict[str, Any] = {"source": "agent", "message": text, "is_copied_context": True}
    calls = [
        {
            "tool_call_id": str(call.get("id", "")),
            "function_name": call["function"]["name"],
            "arguments": _arguments(call["function"].get("arguments")),
        }
        for call in message.get("tool_calls") or ()
    ]
    steps.append({**step, **({"tool_calls": calls} if calls else {})})


def _arguments(given: object) -> dict[str, Any]:
    try:
        value = json.loads(given) if isinstance(given, str) and given else given
    except (ValueError, RecursionError):  # the model may have written invalid JSON
        return {"arguments": given}
    return value if isinstance(value, dict) else {}


def _facts(record: Record, task: Task | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "task": record.task_id,
        "split": record.split,
        "traj_id": record.traj_id,
        "outcome": record.outcome,
        "final_answer": record.final_answer,
    }
    if record.score is not None:
        facts["score"] = record.score.model_dump(
            mode="json", include={"scorer", "version", "value", "detail"}
        )
    if isinstance(task, MCPTask):
        facts["question"] = task.model_dump(
            mode="json",
            include={"query", "system_prompt", "answer", "aug_answers", "scorer", "answer_schema"},
        )
    return facts

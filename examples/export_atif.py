"""Write the ended rollouts of a run as Harbor's trajectories (ATIF 1.8), one a line.

    python examples/export_atif.py --db mongodb://127.0.0.1:27017 --name demo trajectories.jsonl

A rollout's first conversation is its trajectory; each further one (a branch, a rewritten context, a
second agent) is embedded in it, with the steps that an earlier one has marked as copied context.
"""

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any

from agentrl.schema import DispatchedSamplingTask, Record, rebuild_prompts
from agentrl.store import TrajectoryStore

SOURCES = {"user": "user", "assistant": "agent"}
KEPT = (None, "drift", "stop_token")
"""Branch reasons of turns that continue a conversation; others start one with all its messages."""


def trajectory(record: Record, turns: list[DispatchedSamplingTask], model: str) -> dict[str, Any]:
    """Return a rollout as a document; `turns` are all of it, in order."""
    prompts = rebuild_prompts(turns)
    parents = {turn.index: turn.parent for turn in turns if turn.branch_reason in KEPT}
    written: set[int] = set()
    documents: list[dict[str, Any]] = []
    for leaf in (turn for turn in turns if turn.index not in parents.values()):
        path = [leaf]
        while (parent := parents.get(path[0].index)) is not None:
            path.insert(0, turns[parent])
        root, steps = path[0], list[dict[str, Any]]()
        while root.parent is not None:  # the turn that has the tools
            root = turns[root.parent]
        for turn in path:
            steps += [_given(message) for message in turn.added_messages]
            steps.append(_sampled(turn, prompts[turn.index].tolist(), turn.index in written))
            written.add(turn.index)
        agent = {"name": "agentrl", "version": "1", "model_name": model}
        documents.append(
            {
                "schema_version": "ATIF-v1.8",
                "session_id": record.id,
                "trajectory_id": f"{record.id}#{len(documents)}",
                "agent": {**agent, "tool_definitions": list(root.tools)},
                "steps": [{"step_id": n, **step} for n, step in enumerate(steps, 1)],
            }
        )
    first, *embedded = documents
    score = None if record.score is None else record.score.value
    first["extra"] = {"task": record.task_id, "answer": record.final_answer, "score": score}
    return {**first, "subagent_trajectories": embedded} if embedded else first


def _given(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that the model was shown as a step."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return {"source": SOURCES.get(message["role"], "system"), "message": text}


def _sampled(turn: DispatchedSamplingTask, prompt: list[int], is_copy: bool) -> dict[str, Any]:
    """Return a reply of the policy with its tokens, its calls and their results."""
    calls = [
        {"tool_call_id": one.id, "function_name": one.name, "arguments": one.arguments}
        for one in turn.tool_calls
    ]
    results = [{"source_call_id": one.call_id, "content": one.content} for one in turn.tool_results]
    step: dict[str, Any] = {"source": "agent", "message": turn.output_text}
    step |= {"tool_calls": calls} if calls else {}
    step |= {"observation": {"results": results}} if results else {}
    if is_copy:
        return {**step, "is_copied_context": True}
    ids, logprobs = turn.output_ids.tolist(), turn.output_logprobs.astype(float).tolist()
    step["metrics"] = {"prompt_token_ids": prompt, "completion_token_ids": ids}
    step["metrics"] |= {} if any(map(math.isnan, logprobs)) else {"logprobs": logprobs}
    return step


async def export(uri: str, name: str, path: Path) -> None:
    """Write the trajectories of a run to a new file."""
    with path.open("x", encoding="utf-8") as file:
        async with TrajectoryStore.connect(uri, name) as store:
            async for record in store.records.find():
                turns = await store.turns.of_record(record.id)
                if record.outcome is not None and turns:
                    file.write(json.dumps(trajectory(record, turns, name)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--db", required=True, help="MongoDB connection string")
    parser.add_argument("--name", required=True, help="name of the run")
    args = parser.parse_args()
    asyncio.run(export(args.db, args.name, args.file))

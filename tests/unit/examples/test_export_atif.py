"""The rollouts of a run as trajectories in Harbor's format."""

import json
from pathlib import Path

import numpy as np
from support.stored import claim, make_task, make_turn

from agentrl.schema import Run, Score, ToolCall, ToolResult, rebuild_prompts
from agentrl.store import TrajectoryStore
from examples.export_atif import export


async def test_branches_are_embedded_and_tokens_are_those_that_were_sampled(
    store: TrajectoryStore, mongo_uri: str, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store)
    call = ToolCall(id="c1", name="lookup", arguments={"q": "honey é"})
    result = ToolResult(call_id="c1", name="lookup", content="23")
    again = ({"role": "user", "content": "again"},)
    rewritten = {"parent": 1, "shared_len": 40, "branch_reason": "discard_all"}
    drifted = {"parent": 0, "shared_len": 104, "branch_reason": "drift"}
    turns = [
        make_turn(record, 0, tool_calls=(call,)).model_copy(update={"tool_results": (result,)}),
        make_turn(record, 1),
        make_turn(record, 2).model_copy(update={**rewritten, "added_messages": again}),
        make_turn(record, 3).model_copy(update=drifted),
    ]
    for turn in turns:
        await store.turns.append(turn, record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    await store.scores.set(record.id, record.fence, Score(scorer="exact", value=0.5))

    await export(mongo_uri, store.database_name, tmp_path / "out.jsonl")

    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    document = json.loads(line)
    assert document["extra"] == {"task": record.task_id, "answer": "4", "score": 0.5}
    rewrite, drift = document["subagent_trajectories"]
    sampled = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["step_id"] for step in document["steps"]] == list(
        range(1, len(document["steps"]) + 1)
    )
    assert sampled[0]["tool_calls"][0]["arguments"] == {"q": "honey é"}
    assert sampled[0]["observation"]["results"] == [{"source_call_id": "c1", "content": "23"}]
    assert rewrite["steps"][0] == {"step_id": 1, "source": "user", "message": "again"}
    assert [step.get("is_copied_context") for step in drift["steps"] if "metrics" not in step][-1]
    stored = await store.turns.of_record(record.id)
    last = drift["steps"][-1]["metrics"]
    assert last["prompt_token_ids"] == rebuild_prompts(stored)[3].tolist()
    assert last["completion_token_ids"] == stored[3].output_ids.tolist()
    logprobs = np.array(last["logprobs"], dtype=np.float32)
    assert logprobs.tobytes() == stored[3].output_logprobs.tobytes()

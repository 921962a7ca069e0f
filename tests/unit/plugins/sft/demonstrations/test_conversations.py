"""The conversations of a run as files, for fine-tuning and for Hugging Face's `datasets`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stored import TOOLS, fill, make_task

from agentrl.errors import ConfigError
from agentrl.plugins.sft.demonstrations.conversations import export_chat
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations
from agentrl.renderers.stored_conversations import conversations_of
from agentrl.schema import (
    DispatchedSamplingTask,
    Run,
    SamplingParams,
    ToolCall,
    ToolResult,
)
from agentrl.store import TrajectoryStore

ASKED = {"role": "user", "content": "honey?"}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "honey"}}\n</tool_call>'


def turn(index: int, text: str, **fields: Any) -> DispatchedSamplingTask:
    none = np.empty(0, dtype=np.int32)
    return DispatchedSamplingTask(
        **{
            "id": f"t/0/1/{index}",
            "record_id": "t/0",
            "task_id": "t",
            "attempt": 1,
            "index": index,
            "added_ids": none,
            "output_ids": none,
            "output_logprobs": none,
            "version_spans": (),
            "output_text": text,
            "finish_reason": "stop",
            "sampling_params": SamplingParams(),
            "tools": TOOLS if fields.get("parent") is None else (),
            **fields,
        }
    )


LOOKS = turn(
    0,
    f"<think>\nlook first\n</think>\n\nLet me see. {CALL}",
    added_messages=(ASKED,),
    tool_calls=(ToolCall(id="c1", name="lookup", arguments={"q": "honey"}),),
    tool_results=(ToolResult(call_id="c1", name="lookup", content="23"),),
)
CALLED = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "look first",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "lookup", "arguments": '{"q": "honey"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "lookup", "content": "23"}


def test_thinking_calls_and_results_stand_in_fields_of_their_own() -> None:
    answers = turn(1, "<answer>23</answer>", parent=0)
    ((messages, tools),) = conversations_of([LOOKS, answers])
    assert messages == [
        ASKED,
        CALLED,
        RESULT,
        {"role": "assistant", "content": "<answer>23</answer>"},
    ]
    assert tools == list(TOOLS)


def test_branches_are_conversations_and_every_reply_is_learned_once() -> None:
    first = turn(1, "first", parent=0)
    second = turn(2, "second", parent=0, branch_reason="drift")
    edited = turn(
        3,
        "third",
        parent=0,
        branch_reason="edited_context",
        added_messages=(ASKED, {"role": "assistant", "content": "short"}, ASKED),
    )
    other = turn(4, "of another model", trainable=False)
    found = [messages for messages, _ in conversations_of([LOOKS, first, second, edited, other])]
    assert [[m["content"] for m in messages if m["role"] == "assistant"] for messages in found] == [
        ["Let me see.", "first"],
        ["Let me see.", "second"],
        ["short", "third"],
    ]
    weights = [[m.get("weight", 1) for m in ms if m["role"] == "assistant"] for ms in found]
    assert weights == [[1, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": look</tool_call>', [ToolCall(id="c", name="", format_error="bad")]),
        ("<<lookup honey>>", [ToolCall(id="c", name="lookup")]),
    ],
)
def test_a_reply_that_no_format_explains_stays_as_it_was_written(text: str, calls: Any) -> None:
    (conversation,) = conversations_of([turn(0, text, added_messages=(ASKED,), tool_calls=calls)])
    assert conversation[0][-1] == {"role": "assistant", "content": text}


async def test_a_run_becomes_files_that_fine_tuning_reads(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 2, num_turns=2)
    await store.tasks.add([make_task(9)])
    folder = tmp_path / "out"
    assert await export_chat(store, folder) == ("conversations", {"train": 4})
    with pytest.raises(ConfigError, match="already exists"):
        await export_chat(store, folder)
    path = folder / "train.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    assert (row["id"], row["score"], row["outcome"]) == ("train/0/q0/0", 1.0, "answered")
    assert (row["reference"], row["min_version"]) == (0, 0)
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "assistant"]
    examples = list(read_demonstrations(path))
    assert len(examples) == 4
    assert examples[0].tools == TOOLS

"""Trajectories that somebody else wrote: read, or refused in one line that says where."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DatasetError
from agentrl.plugins.sft.demonstrations.atif_documents import messages_of, read_trajectories
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations

CALL = {"tool_call_id": "c1", "function_name": "now", "arguments": {"zone": "UTC"}}
DOCUMENT: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s",
    "agent": {"name": "harness", "version": "2", "model_name": "m"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "What time is it?"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "Let me look.",
            "reasoning_content": "a clock",
            "tool_calls": [CALL],
            "observation": {"results": [{"source_call_id": "c1", "content": "noon"}]},
            "metrics": {"prompt_tokens": 3, "completion_tokens": 2, "cost_usd": 0.1},
        },
        {"step_id": 4, "source": "agent", "message": "Noon.", "future_field": 1},
    ],
}


def written(folder: Path, *documents: object) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return path


def changed(step: int, **fields: Any) -> dict[str, Any]:
    steps = [dict(one) for one in DOCUMENT["steps"]]
    steps[step] |= fields
    return {**DOCUMENT, "steps": steps}


def test_a_foreign_trajectory_becomes_the_messages_of_a_conversation(tmp_path: Path) -> None:
    ((_, trajectory),) = read_trajectories(written(tmp_path, DOCUMENT))
    assert [message["role"] for message in messages_of(trajectory)] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    (talk,) = read_demonstrations(written(tmp_path, DOCUMENT))
    assert talk.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"zone": "UTC"}'
    assert talk.messages[2]["reasoning_content"] == "a clock"
    assert talk.messages[3] == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "now",
        "content": "noon",
    }


def test_one_document_over_many_lines_and_folders_of_them_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trajectory.json").write_text(json.dumps(DOCUMENT, indent=2))
    places = [where for where, _ in read_trajectories(tmp_path)]
    assert places == [f"{tmp_path}/{name}/trajectory.json: document" for name in "ab"]


METRICS = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], 'not a trajectory: "schema_version"'),
        ({**DOCUMENT, "schema_version": "ATIF-v9"}, "schema_version: String should match"),
        ({**DOCUMENT, "steps": []}, "steps: Tuple should have at least 1 item"),
        ({**DOCUMENT, "agent": None}, "agent: Input should be"),
        (changed(1, step_id=7), "step_id 7 is at position 2"),
        (changed(1, tool_calls=[CALL]), "step 2: only agent steps have tool_calls and metrics"),
        (changed(2, message=None), "steps.2.message"),
        (changed(2, message="\ud800"), "a text contains a lone surrogate"),
        (
            changed(2, metrics={**METRICS, "prompt_token_ids": [-1]}),
            "a token id must be a number from",
        ),
        (changed(2, metrics={**METRICS, "completion_token_ids": [2**31]}), "a token id must be a"),
        (changed(2, metrics={**METRICS, "logprobs": [1.0, 2.0]}), "differ in length"),
        (changed(2, metrics={**METRICS, "logprobs": [float("nan")]}), "a finite number"),
        (changed(2, metrics={**METRICS, "logprobs": [-1e300]}), "a finite number"),
        (changed(2, metrics={"completion_token_ids": [1]}), "without prompt_token_ids"),
        (changed(2, metrics={**METRICS, "prompt_token_ids": "x"}), "metrics.prompt_token_ids"),
        ({**DOCUMENT, "subagent_trajectories": [{}]}, "subagent_trajectories.0.schema_version"),
    ],
)
def test_what_is_no_trajectory_is_refused_with_its_place(
    document: object, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, DOCUMENT, document)
    with pytest.raises(DatasetError) as refused:
        list(read_trajectories(path))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{path}: line 2: ")
    assert message in line


@pytest.mark.parametrize("depth", [200, 100_000])
def test_nesting_without_end_is_refused(depth: int, tmp_path: Path) -> None:
    nested = "[" * depth + "]" * depth
    path = tmp_path / "deep.json"
    path.write_text(
        '{"schema_version": "ATIF-v1.8", "agent": {"name": "a"}, "steps": ' + nested + "}"
    )
    with pytest.raises(DatasetError):
        list(read_trajectories(path))


def test_embedded_trajectories_end(tmp_path: Path) -> None:
    document = dict(DOCUMENT)
    for _ in range(400):
        document = {**DOCUMENT, "subagent_trajectories": [document]}
    with pytest.raises(DatasetError, match=r"line 1: "):
        list(read_trajectories(written(tmp_path, document)))


def test_images_are_refused_where_a_conversation_is_made_of_them(tmp_path: Path) -> None:
    source = {"media_type": "image/png", "path": "../../etc/passwd"}
    document = changed(1, message=[{"type": "image", "source": source}])
    with pytest.raises(DatasetError, match="images and audio in trajectories are not supported"):
        list(read_demonstrations(written(tmp_path, document)))


def test_a_folder_without_trajectories_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"contains no \.json or \.jsonl file"):
        list(read_trajectories(tmp_path))
    with pytest.raises(DatasetError, match="No such file"):
        list(read_trajectories(tmp_path / "missing.json"))

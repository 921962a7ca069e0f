"""Attempts out as Harbor's trajectories and in again; trajectories of others into a database."""

import asyncio
import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stored import claim, make_task, make_turn

from agentrl.errors import ConfigError, DatasetError
from agentrl.plugins.sft.demonstrations.atif_attempts import check_trajectories
from agentrl.plugins.sft.demonstrations.atif_export import export_trajectories
from agentrl.plugins.sft.demonstrations.atif_import import import_trajectories
from agentrl.rewards import MCPScorerFactory
from agentrl.rewards.rescore import rescore
from agentrl.schema import (
    DispatchedSamplingTask,
    Record,
    Run,
    Score,
    ToolCall,
    ToolResult,
    rebuild_prompts,
)
from agentrl.store import TrajectoryStore

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "honey \\u00e9"}}\n</tool_call>'


@pytest.fixture
async def copy(mongo_uri: str) -> AsyncIterator[TrajectoryStore]:
    async with TrajectoryStore.connect(mongo_uri.replace("test_", "copy_")) as connected:
        yield connected
        await connected.drop_database()


async def play_tree(store: TrajectoryStore) -> Record:
    """Play a call and an answer, then a rewritten context, and a drifted continuation of turn 0."""
    record = await claim(store)
    calls = (ToolCall(id="c1", name="lookup", arguments={"q": "honey é", "n": [1, None]}),)
    result = ToolResult(call_id="c1", name="lookup", content="23\n<b>", is_error=True)
    first = make_turn(record, 0, text=f"<think>hm</think>{CALL}", tool_calls=calls)
    turns = [
        first.model_copy(update={"tool_results": (result,)}),
        make_turn(record, 1, version=1),
        make_turn(record, 2, num_output=3).model_copy(
            update={
                "parent": 1,
                "shared_len": 40,
                "branch_reason": "discard_all_tools",
                "added_messages": ({"role": "user", "content": "again"},),
            }
        ),
        make_turn(record, 3).model_copy(
            update={"parent": 0, "shared_len": 104, "branch_reason": "drift"}
        ),
    ]
    for turn in turns:
        await store.turns.append(turn, record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    score = Score(scorer="exact", value=0.5, detail="half", step_scores=(0.5, None))
    await store.scores.set(record.id, record.fence, score)
    return record


def compared(turn: DispatchedSamplingTask) -> dict[str, Any]:
    """Return what an exported turn has to keep."""
    kept = turn.model_dump(
        include={
            *("index", "parent", "tool_calls", "output_text", "finish_reason", "branch_reason"),
            *("version_spans", "sampling_params", "added_messages", "tools", "trainable"),
        }
    )
    results = [result.model_copy(update={"seconds": 0.0}) for result in turn.tool_results]
    ids, logprobs = turn.output_ids.tolist(), turn.output_logprobs.tobytes()
    return {**kept, "results": results, "ids": ids, "logprobs": logprobs}


async def exported(store: TrajectoryStore, folder: Path) -> list[dict[str, Any]]:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0, num_generations=2), make_task(1, num_generations=1)])
    for _ in range(3):
        await play_tree(store)
    assert await export_trajectories(store, folder) == {"train": 3}
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


async def test_ids_logprobs_roles_and_calls_are_equal_after_a_round_trip(
    store: TrajectoryStore, copy: TrajectoryStore, tmp_path: Path
) -> None:
    documents = await exported(store, tmp_path / "out")
    assert len(documents[0]["subagent_trajectories"]) == 2
    check_trajectories(tmp_path / "out")
    counts = await import_trajectories(copy, tmp_path / "out")
    assert (counts.num_tasks, counts.num_records, counts.num_turns) == (2, 3, 12)
    records = [record async for record in store.records.find()]
    assert [record.id for record in records] == [one.id async for one in copy.records.find()]
    for record in records:
        before = await store.turns.of_record(record.id)
        after = await copy.turns.of_record(record.id)
        assert [compared(turn) for turn in after] == [compared(turn) for turn in before]
        for one, other in zip(rebuild_prompts(before), rebuild_prompts(after), strict=True):
            assert one.tobytes() == other.tobytes()
        found = await copy.records.get(record.id)
        assert found is not None
        assert found.score is not None
        assert (found.score.value, found.score.scorer, found.score.detail) == (0.5, "exact", "half")
        assert (found.outcome, found.final_answer) == (record.outcome, record.final_answer)
        assert (found.min_version, found.max_version) == (record.min_version, record.max_version)
    task = await copy.tasks.get("train/0/q1")
    assert task == (await store.tasks.get("train/0/q1") or task).model_copy(  # type: ignore[union-attr]
        update={"created_at": task.created_at, "completed_at": task.completed_at}  # type: ignore[union-attr]
    )
    # A scorer works on them as on any record.
    counted = await rescore(copy, MCPScorerFactory.get_scorer("math"))
    assert counted.num_scored == 3


async def test_a_run_is_not_imported_over_another(store: TrajectoryStore, tmp_path: Path) -> None:
    await exported(store, tmp_path / "out")
    with pytest.raises(ConfigError, match="contains a run; import under another --run_name"):
        await import_trajectories(store, tmp_path / "out")


def foreign(**changes: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": [5, 6, 7], "completion_token_ids": [8, 9]}
    more = {"prompt_token_ids": [5, 6, 7, 8, 1], "completion_token_ids": [2], "logprobs": [-0.25]}
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": "../a b",
        "agent": {"name": "x", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "hi"},
            {"step_id": 2, "source": "agent", "message": "hello", "metrics": metrics},
            {"step_id": 3, "source": "user", "message": "more"},
            {"step_id": 4, "source": "agent", "message": "bye", "metrics": more},
            {"step_id": 5, "source": "agent", "message": "no ids"},
        ],
        **changes,
    }


async def test_a_foreign_trajectory_becomes_a_record(copy: TrajectoryStore, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(foreign()))
    counts = await import_trajectories(copy, path)
    assert (counts.num_turns, counts.num_trainable_turns, counts.num_scored) == (3, 2, 0)
    (record,) = [one async for one in copy.records.find()]
    assert (record.id, record.status, record.final_answer) == (
        *("train/0/.._a_b/0", "failed", "no ids"),
    )
    first, second, third = await copy.turns.of_record(record.id)
    assert np.isnan(first.output_logprobs).all()
    assert (second.parent, second.shared_len, second.added_ids.tolist()) == (0, 4, [1])
    assert second.branch_reason == "drift"  # the end of the first reply is missing
    assert second.output_logprobs.tolist() == [-0.25]
    assert second.added_messages == ({"role": "user", "content": "more"},)
    assert (third.trainable, third.output_text) == (False, "no ids")


async def test_an_import_that_is_interrupted_leaves_no_run(
    copy: TrajectoryStore, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    documents = (json.dumps(foreign(trajectory_id=str(number))) for number in range(2000))
    path.write_text("\n".join(documents))
    importing = asyncio.create_task(import_trajectories(copy, path))
    async with asyncio.timeout(20):
        while not await copy.tasks.count():
            await asyncio.sleep(0.01)
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    assert await copy.runs.get() is None


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"score": {"scorer": "s", "value": "much"}}, "extra.agentrl.score"),
        ({"score": {"scorer": "s", "value": float("inf")}}, "extra.agentrl.score"),
        ({"score": [1]}, "extra.agentrl.score"),
        ({"outcome": "won"}, "extra.agentrl.outcome: 'won' is not known"),
        ({"outcome": "w" * 9_000}, "www' is not known"),
        ({"question": {"query": 7}}, "extra.agentrl.question"),
    ],
)
def test_facts_that_make_no_sense_are_refused(
    ours: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(foreign(extra={"agentrl": ours})))
    with pytest.raises(DatasetError) as refused:
        check_trajectories(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"turn": [1], "parent": {}, "branch_reason": None}, None),
        ({"turn": 10**30, "parent": -4, "text": 7, "trainable": "no"}, None),
        ({"turn": 0, "parent": 0}, None),
        ({"finish_reason": [], "sampling_params": "hot"}, "step 2: finish_reason: "),
        ({"sampling_params": "hot"}, "step 2: sampling_params: "),
        ({"versions": [[0, 0, 99]]}, "[0, 0, 99] is not a span of 2 tokens"),
        ({"versions": [[0, 1]]}, "a span is [version, start, end]"),
        ({"branch_reason": 7}, "step 2: branch_reason: "),
    ],
)
def test_nonsense_in_our_own_fields_is_ignored_or_refused_with_its_place(
    ours: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    document = foreign()
    for step in document["steps"]:
        step["extra"] = {"agentrl": ours}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(document))
    if message is None:
        check_trajectories(path)
        return
    with pytest.raises(DatasetError) as refused:
        check_trajectories(path)
    assert str(refused.value).startswith(f"{path}: line 1: ")
    assert message in str(refused.value)


def test_task_that_comes_again_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    names = ("a", "b", "a")
    path.write_text("".join(json.dumps(foreign(trajectory_id=n)) + "\n" for n in names))
    with pytest.raises(DatasetError, match=r"line 3: task train/0/a occurs twice"):
        check_trajectories(path)


@pytest.mark.slow
async def test_harbors_own_models_accept_an_export(
    store: TrajectoryStore, tmp_path: Path, harbor_models: Any
) -> None:
    for document in await exported(store, tmp_path / "out"):
        found = harbor_models.Trajectory.model_validate(document)
        assert found.steps[-1].metrics.completion_token_ids


@pytest.fixture
def harbor_models(tmp_path: Path) -> Iterator[Any]:
    """Harbor's pydantic models, from its wheel: the package itself asks for a newer Python."""
    words = "download -q --no-deps --only-binary=:all: --python-version 3.12 harbor==0.24.0"
    subprocess.run(
        [sys.executable, "-m", "pip", *words.split(), "-d", tmp_path],
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("harbor-*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.startswith("harbor/models/trajectories")]
        files.extractall(tmp_path / "models", names)
    sys.path.insert(0, str(tmp_path / "models"))
    try:
        yield importlib.import_module("harbor.models.trajectories")
    finally:
        sys.path.remove(str(tmp_path / "models"))
        for name in [name for name in sys.modules if name.split(".")[0] == "harbor"]:
            del sys.modules[name]

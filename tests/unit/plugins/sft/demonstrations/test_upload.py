"""Items of files as Records, one row each, in the tokens of the model that is to learn them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.tiny_tokenizer import write_tokenizer
from rich.console import Console

from agentrl.config.sections import AlgorithmSection
from agentrl.data import select_group
from agentrl.errors import ConfigError, DatasetError
from agentrl.plugins.sft.curriculum import record_examples
from agentrl.plugins.sft.demonstrations.upload import Exchange, UploadConfig, Uploader
from agentrl.renderers import Renderer
from agentrl.schema import MCPTask, Message, rebuild_prompts
from agentrl.store import TrajectoryStore
from examples import upload_sft_data

MakeUploader = Callable[..., "Sums"]


class Sums(Uploader):
    def validate_task(self, item: dict[str, Any]) -> bool:
        return bool(item["a"] >= 0)

    def score(self, item: dict[str, Any]) -> float:
        return float(item.get("score", 1.0))

    def req_and_resp(self, item: dict[str, Any]) -> list[Exchange]:
        asked: list[Message] = [{"role": "user", "content": f"{item['a']} + {item['b']}?"}]
        said = {"role": "assistant", "content": f"{item['a'] + item['b']}"}
        exchanges: list[Exchange] = [({"messages": asked}, said)]
        if item.get("doubt"):
            again = [*asked, said, {"role": "user", "content": "sure?"}]
            exchanges.append(({"messages": again}, {"role": "assistant", "content": "yes"}))
        if item.get("aside"):
            aside: list[Message] = [{"role": "user", "content": "sum up"}, said]
            aside.append({"role": "user", "content": "shorter"})
            exchanges.append(({"messages": aside}, {"role": "assistant", "content": "ok"}))
        return exchanges


@pytest.fixture
def make_uploader(tmp_path: Path, mongo_uri: str) -> MakeUploader:
    def make(*items: dict[str, Any], chunk_size: int = 2) -> Sums:
        path = tmp_path / "sums.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        return Sums(
            UploadConfig(
                model_name=str(write_tokenizer(tmp_path / "model")),
                data_files=[path],
                mongo_connection_url=mongo_uri,
                mongo_db_name=mongo_uri.partition("?")[0].rpartition("/")[2],
                chunk_size=chunk_size,
                task_description="sums",
            )
        )

    return make


async def test_every_item_becomes_a_scored_record_with_a_row(
    make_uploader: MakeUploader, store: TrajectoryStore, tmp_path: Path
) -> None:
    items = [
        {"a": 1, "b": 2},
        {"a": -1, "b": 2},
        {"a": 3, "b": 4, "doubt": True, "score": 0.25},
        {"a": 5, "b": 6, "aside": True},
    ]
    uploader = make_uploader(*items)
    report = await uploader.upload()
    assert [row.record_id for row in report.rows if row.record_id] == [
        "train/0/sums/line1/0",
        "train/0/sums/line3/0",
        "train/0/sums/line4/0",
    ]
    assert [row.reason for row in report.rows if row.reason] == ["rejected by validate_task"]
    console = Console(record=True, width=120)
    console.print(report.table())
    text = console.export_text()
    assert "3 of 4 items uploaded" in text
    assert all(row.item in text for row in report.rows)

    renderer = Renderer.load(tmp_path / "model")
    doubted = await store.records.get("train/0/sums/line3/0")
    assert doubted is not None
    assert doubted.score is not None
    assert (doubted.status, doubted.score.value, doubted.final_answer) == ("scored", 0.25, "yes")
    turns = await store.turns.of_record(doubted.id)
    assert [renderer.decode(turn.output_ids) for turn in turns] == ["7<|im_end|>", "yes<|im_end|>"]
    assert (turns[1].parent, turns[1].shared_len) == (
        0,
        len(turns[0].added_ids) + len(turns[0].output_ids),
    )
    assert renderer.decode(rebuild_prompts(turns)[1]).count("sure?") == 1
    aside = await store.turns.of_record("train/0/sums/line4/0")
    assert [turn.parent for turn in aside] == [None, None, 1]
    assert [turn.trainable for turn in aside] == [True, False, True]
    task = await store.tasks.get("train/0/sums/line1")
    assert isinstance(task, MCPTask)
    assert (task.query, task.status, task.description) == ("1 + 2?", "completed", "sums")


async def test_an_item_whose_score_is_no_finite_number_is_left_out_by_name(
    make_uploader: MakeUploader, store: TrajectoryStore
) -> None:
    report = await make_uploader({"a": 1, "b": 2, "score": "nan"}, {"a": 2, "b": 2}).upload()
    assert report.rows[0].reason == "its score is nan, not a finite number"
    assert await store.tasks.count() == 1


async def test_uploading_again_changes_nothing(
    make_uploader: MakeUploader, store: TrajectoryStore
) -> None:
    uploader = make_uploader({"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 3, "b": 2})
    await uploader.upload()
    again = await uploader.upload()
    assert {row.reason for row in again.rows} == {"uploaded before"}
    assert await store.tasks.count() == 3


async def test_given_text_is_never_taken_for_sampled_tokens(
    make_uploader: MakeUploader, store: TrajectoryStore
) -> None:
    """Behavior logprobs that nobody knows are no ratios: such turns are kept out of the loss."""
    await make_uploader({"a": 1, "b": 2}).upload()
    ((record,),) = await store.ledger.ready_groups(limit=1)
    assert np.isnan(record.turns[0].output_logprobs).all()
    assert record.score is not None
    other = record.model_copy(
        update={
            "record_id": "train/0/sums/line1/1",
            "traj_id": 1,
            "score": record.score.model_copy(update={"value": 0.0}),
        }
    )
    group = select_group([record, other], AlgorithmSection(), policy_version=0)
    assert not group.usable
    assert group.dropped_records[record.record_id] == "no_logprobs"
    assert group.left_out[0].reason == "no_logprobs"


async def test_a_database_that_is_being_sampled_is_left_alone(
    make_uploader: MakeUploader, store: TrajectoryStore
) -> None:
    await store.tasks.add([MCPTask(id="train/0/q", query="?")])
    with pytest.raises(ConfigError, match="has pending slots"):
        await make_uploader({"a": 1, "b": 2}).upload()


async def test_a_line_that_is_no_json_is_named(
    make_uploader: MakeUploader, store: TrajectoryStore, tmp_path: Path
) -> None:
    uploader = make_uploader({"a": 1, "b": 2})
    (tmp_path / "sums.jsonl").write_text('{"a": 1, "b": 2}\n{"a": \n')
    with pytest.raises(DatasetError, match="line 2: not valid JSON"):
        await uploader.upload()


async def test_the_example_uploads_what_can_then_be_learnt(
    make_uploader: MakeUploader,
    store: TrajectoryStore,
    mongo_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_uploader()  # writes the tokenizer
    path = tmp_path / "problems.jsonl"
    solved = {"problem": "1 + 1?", "solution": "It is \\boxed{2}."}
    path.write_text(f"{json.dumps(solved)}\n{json.dumps({'problem': '?', 'solution': '2'})}\n")
    uri, name = mongo_uri, mongo_uri.partition("?")[0].rpartition("/")[2]
    argv = ["upload", str(path), "--db", uri, "--name", name, "--model", str(tmp_path / "model")]
    monkeypatch.setattr("sys.argv", argv)
    await asyncio.to_thread(upload_sft_data.main)
    assert "1 of 2 items uploaded" in capsys.readouterr().out
    (example,) = await record_examples(store, 0.5)
    renderer = Renderer.load(tmp_path / "model")
    (turn,) = example.turns
    assert renderer.decode(turn.output_ids) == "It is \\boxed{2}.<|im_end|>"

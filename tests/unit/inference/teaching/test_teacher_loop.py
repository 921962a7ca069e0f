"""A teacher on a real engine: its numbers are the model's own, and an outage only delays them."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import engine_process
from support.training import Player, train_tasks, write_model

from agentrl.data.rows import TokenTree
from agentrl.errors import ConfigError, ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.teaching.privileged_prompts import PrivilegedPrompts
from agentrl.inference.teaching.teacher_loop import TeacherLoop
from agentrl.inference.teaching.teacher_process import parse_teacher
from agentrl.inference.teaching.vocabularies import check_same_tokens
from agentrl.models.load import load_policy
from agentrl.models.policy import target_logprobs
from agentrl.renderers.renderer import Renderer
from agentrl.schema import DBRecordData
from agentrl.store import TrajectoryStore


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "teacher", seed=1)


@pytest.fixture(scope="module")
def engine(teacher_model: Path) -> Iterator[str]:
    with engine_process(teacher_model) as address:
        yield address


@pytest.fixture
async def played(store: TrajectoryStore, teacher_model: Path) -> TrajectoryStore:
    """Two groups of two records, played by another model."""
    student = write_model(teacher_model.parent / "student", seed=2)
    await store.tasks.add(train_tasks(2, 2))
    await Player(student).play_groups(store, [[1.0, 0.0], [0.0, 0.0]], num_turns=3)
    return store


@asynccontextmanager
async def loop(
    store: TrajectoryStore, address: str, model: Path, *prompts: str, **changes: Any
) -> AsyncIterator[TeacherLoop]:
    written = PrivilegedPrompts(prompts or ("",), Renderer.load(model), store, solution_score=1.0)
    settings = {"prompts": written, "concurrency": 2, "exit_when_taught": True, **changes}
    async with SGLangClient(address) as client:
        yield TeacherLoop(store, client, "big", **settings)


async def records(store: TrajectoryStore) -> list[DBRecordData]:
    groups = await store.ledger.ready_groups(limit=9)
    return [record for group in groups for record in group]


async def test_logprobs_are_the_trainers_own_of_that_model(
    played: TrajectoryStore, engine: str, teacher_model: Path
) -> None:
    async with loop(played, engine, teacher_model) as teacher:
        await teacher.run(asyncio.Event())
    policy = load_policy(teacher_model, dtype=torch.float32, device="cpu")
    found = await records(played)
    assert len(found) == 4
    for record in found:
        assert list(record.taught) == ["big"]
        with torch.no_grad():
            own = target_logprobs(policy, TokenTree.from_turns(record.turns).row).logprobs.numpy()
        given = np.concatenate([turn.teacher_logprobs["big"] for turn in record.turns])
        behavior = np.concatenate([turn.output_logprobs for turn in record.turns])
        np.testing.assert_allclose(given, own, atol=1e-4)
        assert np.abs(given - behavior).max() > 0.01
    assert (teacher.counts.num_records, teacher.counts.num_turns) == (4, 12)


async def test_a_privileged_prompt_stands_before_every_conversation(
    played: TrajectoryStore, engine: str, teacher_model: Path
) -> None:
    text = "<|im_start|>system\nBe brief.<|im_end|>\n"
    async with loop(played, engine, teacher_model, text) as teacher:
        await teacher.run(asyncio.Event())
    prompt = Renderer.load(teacher_model).sampled_ids(text)
    oracle = Player(teacher_model)
    first = (await records(played))[0].turns[0]
    expected = oracle.logprobs(np.concatenate([prompt, first.added_ids]), first.output_ids)
    np.testing.assert_allclose(first.teacher_logprobs["big"], expected, atol=1e-4)
    plain = oracle.logprobs(first.added_ids, first.output_ids)
    assert np.abs(expected - plain).max() > 0.001


async def test_a_solved_attempt_of_the_group_teaches_the_others_and_no_one_else(
    played: TrajectoryStore, engine: str, teacher_model: Path
) -> None:
    """SDPO: the text is the solution's, with control tokens as plain characters."""
    for record in await records(played):
        reply = f"<think>Hm.</think>It is {record.record_id}.<|im_end|>"
        await played.database["turns"].update_one(
            {"_id": record.turn_ids[-1]}, {"$set": {"output_text": reply}}
        )
    text = "<|im_start|>system\n{answer}: {solution}<|im_end|>\n"
    async with loop(played, engine, teacher_model, text) as teacher:
        await teacher.run(asyncio.Event())
    # Group 0 has one solved attempt, which has no other solution beside it; group 1 has none.
    solved, failed, *others = await records(played)
    assert [one.score and one.score.value for one in (solved, failed)] == [1.0, 0.0]
    assert all(not turn.teacher_logprobs for one in (solved, *others) for turn in one.turns)
    assert (teacher.counts.num_records, teacher.counts.num_without_prompt) == (4, 3)
    renderer, oracle = Renderer.load(teacher_model), Player(teacher_model)
    ids = [
        renderer.sampled_ids("<|im_start|>system\n"),
        renderer.encode(f"0: It is {solved.record_id}.<|im_end|>"),
        renderer.sampled_ids("<|im_end|>\n"),
    ]
    first = failed.turns[0]
    expected = oracle.logprobs(np.concatenate([*ids, first.added_ids]), first.output_ids)
    np.testing.assert_allclose(first.teacher_logprobs["big"], expected, atol=1e-4)


async def test_the_first_prompt_that_has_its_values_is_read(
    played: TrajectoryStore, engine: str, teacher_model: Path
) -> None:
    one, other, *_ = await records(played)
    await played.database["record_data"].update_one(
        {"_id": other.record_id}, {"$set": {"score.detail": "line 3: no such name"}}
    )
    prompts = ("{feedback}", "{args.level}", '{"query": "{query}"}')
    async with loop(played, engine, teacher_model, *prompts) as teacher:
        await teacher.run(asyncio.Event())
    renderer, oracle = Renderer.load(teacher_model), Player(teacher_model)
    texts = {one.record_id: '{"query": "question 0"}', other.record_id: "line 3: no such name"}
    for record in (await records(played))[:2]:
        first = record.turns[0]
        prompt = np.concatenate([renderer.encode(texts[record.record_id]), first.added_ids])
        expected = oracle.logprobs(prompt, first.output_ids)
        np.testing.assert_allclose(first.teacher_logprobs["big"], expected, atol=1e-4)


async def test_an_outage_of_the_server_delays_and_loses_nothing(
    played: TrajectoryStore, teacher_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_process(teacher_model, is_sacrificed=True) as address:
        port = address.rpartition(":")[2]
    caplog.set_level(logging.WARNING)
    async with loop(played, address, teacher_model) as teacher:
        running = asyncio.create_task(teacher.run(asyncio.Event()))
        while "asking again" not in caplog.text:
            await asyncio.sleep(0.05)
        assert all(not record.taught for record in await records(played))
        with engine_process(teacher_model, "--port", port):
            await running
    assert all(record.taught for record in await records(played))
    assert all(turn.teacher_logprobs for record in await records(played) for turn in record.turns)


async def test_a_stopped_teacher_leaves_its_records_to_others(
    played: TrajectoryStore, engine: str, teacher_model: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with loop(played, address, teacher_model, concurrency=4) as teacher:
            stop = asyncio.Event()
            running = asyncio.create_task(teacher.run(stop))
            while await played.database["record_data"].count_documents({"teaching.big": None}):
                await asyncio.sleep(0.05)
            stop.set()
            await running
    async with loop(played, engine, teacher_model) as other:
        await other.run(asyncio.Event())
    assert other.counts.num_records == 4


async def test_a_refused_sequence_has_no_numbers_rather_than_zeros(
    played: TrajectoryStore, teacher_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The conversations take 24 tokens.
    with engine_process(teacher_model, "--context-length", "20") as address:
        async with loop(played, address, teacher_model) as teacher:
            await teacher.run(asyncio.Event())
    assert teacher.counts.num_refused == 4
    assert "left out of training" in caplog.text
    for record in await records(played):
        assert list(record.taught) == ["big"]
        assert all(not turn.teacher_logprobs for turn in record.turns)


async def test_a_server_that_refuses_everyone_ends_the_teacher(
    played: TrajectoryStore, teacher_model: Path
) -> None:
    locked = {"AGENTRL_API_KEY": "secret"}
    with engine_process(teacher_model, environment=locked) as address:
        async with loop(played, address, teacher_model) as teacher:
            with pytest.raises(ServerRefused, match="401"):
                await teacher.run(asyncio.Event())
    assert await played.teaching.claim("big", "other", 60) is not None


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy")
    check_same_tokens("--teacher big", policy, policy)
    other = write_model(tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|im_end|>", "<|end|>"))
    with pytest.raises(ConfigError, match=r"--teacher big: .* token 258 is '<\|end\|>' there"):
        check_same_tokens("--teacher big", other, policy)


@pytest.mark.parametrize("text", ["big", "=http://1", "big=", "b.g=model"])
def test_a_teacher_is_a_name_and_a_model(text: str) -> None:
    with pytest.raises(ConfigError, match="give NAME=URL or NAME=PATH"):
        parse_teacher(text)


def test_the_demos_model_teaches_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(parse_teacher("self=assets/demo/model").model).is_dir()
    assert parse_teacher("far=http://h:1").model == "http://h:1"

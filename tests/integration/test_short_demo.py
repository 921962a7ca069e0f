"""What `agentrl init` makes, trained as it is: all processes, for real, from the command line."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pymongo import MongoClient
from support.demo_run import config_path, database_uri, logs, run_command
from support.patience import PATIENCE

from agentrl.addresses import is_loopback
from agentrl.cli.main import main
from agentrl.config.loading import load_config
from agentrl.data import TokenTree
from agentrl.errors import ConfigError
from agentrl.models.load import load_policy
from agentrl.models.policy import PolicyModel, target_logprobs
from agentrl.schema import rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.rl.bundle import bundled_store, unpacked
from agentrl.trainer.rl.replay import Difference, replay

NUM_STEPS, GROUPS_PER_STEP, NUM_GENERATIONS = 3, 4, 8
"""As config.yaml of the project says."""
torch.set_num_threads(1)
KEYS = {"AGENTRL_API_KEY": "the-data-key", "AGENTRL_ADMIN_KEY": "the-admin-key"}


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left."""

    folder: Path
    output: str
    killed_pid: int | None
    listeners: dict[str, set[str]]
    """Programs that listened while it ran -> the addresses that they listened on."""
    environments: dict[str, dict[str, str]]
    """What its processes found in their environment, by their command lines."""

    @property
    def summary(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "output/summary.json").read_text())
        return found


def command(folder: Path) -> list[str]:
    return run_command(
        folder,
        config=folder / "project/config.yaml",
        groups_per_step=GROUPS_PER_STEP,
        num_generations=NUM_GENERATIONS,
        keep_policies=10,
        inference_request_log=folder / "requests.jsonl",
    )


def sampler_pids(folder: Path) -> list[int]:
    """Return the pids of this run's samplers, which carry its configuration on their line."""
    config = str(config_path(folder))
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "sample" in words and config in words:
            pids.append(int(path.parent.name))
    return pids


async def holds_slots(folder: Path, pid: int) -> bool:
    """Return whether a sampler holds running training slots."""
    async with TrajectoryStore.connect(database_uri(folder)) as store:
        async for record in store.records.find(status="running", split="train"):
            if record.lease is not None and f":{pid}:" in record.lease.owner:
                return True
    return False


def kill_a_busy_sampler(folder: Path, process: "subprocess.Popen[str]") -> int:
    """Kill -9 a sampler that holds slots, once the first step is done.

    It is stopped for the look into the database, so that it cannot finish them meanwhile.
    """
    deadline = time.monotonic() + PATIENCE
    metrics = folder / "output/metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().strip():
            for pid in sampler_pids(folder):
                os.kill(pid, signal.SIGSTOP)
                if asyncio.run(holds_slots(folder, pid)):
                    os.kill(pid, signal.SIGKILL)
                    return pid
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("the run ended, or took too long, before a busy sampler could be killed")


def listeners(run: psutil.Process) -> dict[str, set[str]]:
    """Return the addresses that the processes of a run listen on, by their command lines."""
    found: dict[str, set[str]] = {}
    for process in run.children(recursive=True):
        try:
            name = " ".join(process.cmdline())
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:  # it was the one that was killed
            continue
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN:
                found.setdefault(name, set()).add(socket.laddr.ip)
    return found


def environments(run: psutil.Process) -> dict[str, dict[str, str]]:
    """Return the environments of the processes of a run, by their command lines."""
    found: dict[str, dict[str, str]] = {}
    for process in run.children(recursive=True):
        try:
            found[" ".join(process.cmdline())] = process.environ()
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("short")
    assert main(["init", str(folder / "project")]) == 0
    process = subprocess.Popen(
        command(folder),
        cwd=folder / "project",
        text=True,
        env=os.environ | KEYS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        killed = kill_a_busy_sampler(folder, process)
        found = listeners(psutil.Process(process.pid))
        surroundings = environments(psutil.Process(process.pid))
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert process.returncode == 0, output + logs(folder)
    return FinishedRun(folder, output, killed, found, surroundings)


@pytest.fixture(scope="module")
def uri(run: FinishedRun) -> Iterator[str]:
    """The database of the finished run, served for all tests."""
    with EmbeddedMongo(run.folder / "mongo") as mongo:
        yield mongo.uri("short")


@pytest.fixture
async def store(uri: str) -> AsyncIterator[TrajectoryStore]:
    async with TrajectoryStore.connect(uri) as store:
        yield store


def test_the_run_ends_by_itself_and_says_where_everything_is(run: FinishedRun) -> None:
    for name in (
        "log files",
        "checkpoints",
        "summary",
        "picture",
        "database",
        "in a browser",
        "Compass",
    ):
        assert name in run.output
    assert re.search(r"mongodb://agentrl:\*\*\*@127\.0\.0\.1:\d+/short", run.output)
    assert (run.folder / "logs/short_train_0.log").stat().st_size > 0
    assert (run.folder / "output/reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.folder / "output/checkpoints").glob("*/model/model.safetensors"))


def test_the_summary_holds_one_reward_a_step(run: FinishedRun) -> None:
    summary = run.summary
    assert summary["steps"] == NUM_STEPS
    rewards = summary["reward_mean"]
    assert isinstance(rewards, list)
    assert len(rewards) == NUM_STEPS
    assert all(0.0 <= reward <= 1.0 for reward in rewards if reward is not None)
    for key in ("eval_reward", "tokens", "seconds", "staleness", "versions"):
        assert key in summary


def test_nothing_listens_beyond_this_machine(run: FinishedRun) -> None:
    for program in ("mongod", "agentrl.plugins.engine", "tools.py"):
        assert any(program in name for name in run.listeners), (program, list(run.listeners))
    addresses = set().union(*run.listeners.values())
    assert all(is_loopback(address) for address in addresses), run.listeners


def test_only_those_who_control_servers_have_the_key_for_it(run: FinishedRun) -> None:
    programs = {
        "train": "agentrl train",
        "serve": "agentrl serve",
        "sample": "agentrl sample",
        "engine": "agentrl.plugins.engine",
        "tools": "tools.py",
    }
    given = {
        role: {key for key, text in KEYS.items() if environment.get(key) == text}
        for role, program in programs.items()
        for line, environment in run.environments.items()
        if program in line
    }
    both = set(KEYS)
    assert given == {
        "train": both,
        "serve": both,
        "engine": both,
        "sample": {"AGENTRL_API_KEY"},
        "tools": set(),
    }


def test_no_key_is_among_arguments_or_in_a_file_or_document(run: FinishedRun, uri: str) -> None:
    keys = [key.encode() for key in KEYS.values()]
    texts = {line: line.encode() for line in run.environments}
    texts |= {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with MongoClient[dict[str, Any]](uri) as client:
        database = client.get_default_database()
        for name in set(database.list_collection_names()) - {"system.views"}:
            texts[name] = repr(list(database[name].find())).encode()
    assert {"runs", "inference_services"} <= set(texts)
    assert not [name for name, text in texts.items() if any(key in text for key in keys)]


def test_no_process_of_the_run_is_left(run: FinishedRun) -> None:
    assert sampler_pids(run.folder) == []


async def test_every_link_resolves_from_task_to_ledger(
    run: FinishedRun, store: TrajectoryStore
) -> None:
    num_trained = 0
    async for task in store.tasks.find(split="train", status="completed"):
        records = await store.records.of_task(task.id)
        assert [record.id for record in records] == [f"{task.id}/{i}" for i in range(len(records))]
        assert len(records) == task.num_generations
        for record in records:
            turns = await store.turns.of_record(record.id)
            assert [turn.id for turn in turns] == list(record.turns)
            assert all(turn.task_id == task.id for turn in turns)
    async for data in store.ledger.find(status="trained"):
        trained = await store.records.get(data.record_id)
        assert trained is not None
        assert list(trained.turns) == list(data.turn_ids)
        assert data.ledger["trainer"].trained_count == 1
        num_trained += 1
    assert num_trained > 0


async def test_the_killed_samplers_slots_were_played_again_and_no_group_is_left_open(
    run: FinishedRun, store: TrajectoryStore
) -> None:
    again = [
        record
        async for record in store.records.find(split="train")
        if any(
            f":{run.killed_pid}:" in attempt.owner and attempt.ended_by == "expired"
            for attempt in record.attempts
        )
    ]
    assert again
    for record in again:
        assert len(record.attempts) >= 2
        assert record.status == "scored"


async def test_prompts_rebuilt_from_the_database_are_what_the_engine_was_sent(
    run: FinishedRun, store: TrajectoryStore
) -> None:
    sent = set()
    for line in (run.folder / "requests.jsonl").read_text().splitlines():
        request = json.loads(line)
        sent.add((tuple(request["input_ids"]), tuple(request["output_ids"])))
    num_turns = 0
    async for data in store.ledger.find(status="trained", hydrate=True):
        for turn, prompt in zip(data.turns, rebuild_prompts(data.turns), strict=True):
            assert (tuple(prompt.tolist()), tuple(turn.output_ids.tolist())) in sent
            num_turns += 1
    assert num_turns > NUM_STEPS * GROUPS_PER_STEP


async def test_trainer_and_engine_agree_on_logprobs_of_every_version(
    run: FinishedRun, store: TrajectoryStore
) -> None:
    policies: dict[int, PolicyModel] = {}
    async for data in store.ledger.find(status="trained", hydrate=True):
        version = data.min_version
        if version is None or version != data.max_version:
            continue
        if version not in policies:
            weights = run.folder / f"output/policy/{version:06d}"
            policies[version] = load_policy(weights, dtype=torch.float32, device="cpu")
        policy = policies[version]
        row = TokenTree.from_turns(data.turns).row
        with torch.no_grad():
            logprobs = target_logprobs(policy, row).logprobs.numpy()
        behavior = np.concatenate([turn.output_logprobs for turn in data.turns])
        np.testing.assert_allclose(logprobs, behavior, atol=1e-4)
    assert policies


def test_every_step_is_made_again_bit_for_bit(
    run: FinishedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder / "project")
    words = ["replay", str(run.folder / "output"), "--step", f"1-{NUM_STEPS}", "--json"]
    assert main(words) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    found = [(s["step"], s["equal"], s["largest_difference"]) for s in steps]
    assert found == [(step, True, 0.0) for step in range(1, NUM_STEPS + 1)]
    # Of the first step no checkpoint is left.
    assert [step["weights"] for step in steps] == ["not kept", "equal", "equal"]


def replayed(run: FinishedRun, uri: str, step: int) -> dict[str, Difference]:
    """Make a step again in this process; return what is different, by its name."""
    config = load_config({"config": str(config_path(run.folder))})
    found = replay(config, uri, step, step)
    assert found is not None
    return {one.what: one for one in found[0].differences}


def other_token(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a turn with another first one."""
    ids = np.frombuffer(turn["output_ids"], dtype=np.int32).copy()
    ids[0] += 1
    return {"output_ids": ids.tobytes()}


def test_a_changed_token_is_named_by_its_turn(run: FinishedRun, uri: str) -> None:
    with MongoClient[dict[str, Any]](uri) as client:
        database = client.get_default_database()
        used = database.turn_training.find_one(
            {"step": 2, "position": {"$ne": None}, "ratio": {"$ne": None}}
        )
        assert used is not None
        turn = database.turns.find_one({"_id": used["turn_id"]})
        assert turn is not None
        database.turns.update_one({"_id": turn["_id"]}, {"$set": other_token(turn)})
        try:
            found = replayed(run, uri, 2)
        finally:
            before = {"output_ids": turn["output_ids"]}
            database.turns.update_one({"_id": turn["_id"]}, {"$set": before})
        assert f"turn {turn['_id']} ratio" in found
        assert {"loss", "grad_norm"} <= found.keys()
        assert any(name.startswith("weights ") for name in found)


def test_a_changed_score_is_named_by_its_advantage(run: FinishedRun, uri: str) -> None:
    with MongoClient[dict[str, Any]](uri) as client:
        records = client.get_default_database().record_data
        data = records.find_one({"ledger.trainer.trained_at": 3})
        assert data is not None
        value = data["score"]["value"]
        records.update_one({"_id": data["_id"]}, {"$set": {"score.value": value + 0.25}})
        try:
            found = replayed(run, uri, 3)
        finally:
            records.update_one({"_id": data["_id"]}, {"$set": {"score.value": value}})
    changed = {name for name in found if name.endswith(" advantage")}
    assert any(data["task_id"] in name for name in changed)


def test_a_changed_learning_rate_is_named(run: FinishedRun, uri: str) -> None:
    config = load_config({"config": str(config_path(run.folder))})
    rate = config.trainer.learning_rate
    trainer = config.trainer.model_copy(update={"learning_rate": rate * 2})
    found = replay(config.model_copy(update={"trainer": trainer}), uri, 3, 3)
    assert found is not None
    named = {one.what for one in found[0].differences}
    assert {"learning_rate"} < named
    assert "loss" not in named
    assert found[0].weights == "different"


def test_a_bundle_of_steps_is_replayed_without_the_run(
    run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.tar"
    words = ["store", "bundle", str(run.folder / "output"), "--steps", "3", "--out", str(file)]
    assert main(words) == 0
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with unpacked(file, {}) as bundle, bundled_store(bundle.config) as uri:
        assert str(run.folder) not in (bundle.config.run.output_path / "config.yaml").read_text()
        found = replay(bundle.config, uri, *bundle.steps)
    assert found is not None
    assert [(one.step, one.differences, one.weights) for one in found] == [(3, (), "equal")]


def test_a_step_that_was_not_trained_is_refused(run: FinishedRun, uri: str) -> None:
    with pytest.raises(ConfigError, match=r"step 9 of short was not trained; it has steps 1 to 3"):
        replay(load_config({"config": str(config_path(run.folder))}), uri, 9, 9)

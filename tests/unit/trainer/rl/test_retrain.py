"""A run's steps made again: all of them bit for bit, and without the records of a condition."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.doc_blocks import run_shell, write_blocks
from support.training import MakeConfig, Player, train_tasks

from agentrl.cli.main import main
from agentrl.config.loading import write_config
from agentrl.config.sections import RootConfig
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document
from agentrl.trainer.checkpoint import latest_checkpoint
from agentrl.trainer.metrics.metrics_file import read_metrics
from agentrl.trainer.rl.training_loop import train

SCORES = [
    *([1.0, 0.0, 0.0], [0.0, 1.0, 1.0]),  # step 1
    *([1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]),  # step 2, and a group without signal
    *([1.0, 0.0, 0.0], [1.0, 0.0, 0.0]),  # step 3
    *([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]),  # step 4
    *([1.0, 0.0, 0.0], [1.0, 0.0, 0.5]),  # step 5
]
"""Three records each; two groups with signal make a step."""
NUM_STEPS = 5
BAD = ["train/0/q5/0", "train/0/q7/1", "train/0/q8/2", "train/0/q9/1"]
"""Of a group of step 3 and of step 5, and of both groups of step 4."""
WITHOUT = 'score.detail ~ "TIMEOUT"'


def in_store(mongo_uri: str, use: Callable[[TrajectoryStore], Awaitable[Any]]) -> Any:
    async def opened() -> Any:
        name = mongo_uri.partition("?")[0].rpartition("/")[2]
        async with TrajectoryStore.connect(mongo_uri, name) as store:
            return await use(store)

    return asyncio.run(opened())


@pytest.fixture
def trained(
    make_config: MakeConfig, mongo_uri: str, model_path: Path, tmp_path: Path
) -> RootConfig:
    """A run of five steps, with checkpoints after steps 2, 4 and 5."""
    config = make_config(
        output_dir=str(tmp_path / "output/whole"),
        max_steps=NUM_STEPS,
        save_steps=2,
        save_total_limit=9,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        full_determinism="true",
    )

    async def fill(store: TrajectoryStore) -> None:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(len(SCORES), 3))
        await Player(model_path).play_groups(store, SCORES)
        told = {"$set": {"score.detail": "judge: timeout after 30 s"}}
        await store.database["records"].update_many({"_id": {"$in": BAD}}, told)

    in_store(mongo_uri, fill)
    train(config)
    write_config(config, config.run.output_path / "config.yaml")
    return config


def retrained(config: RootConfig, name: str, *flags: str) -> list[str]:
    output = config.run.output_path
    new = ("--run_name", name, "--output_dir", str(output.parent / name))
    uri = config.store.db_connection_string
    assert uri is not None
    database = ("--db_connection_string", uri.get_secret_value())
    return ["retrain", str(output), *new, *database, *flags]


def weights(output: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(output)
    assert checkpoint is not None
    assert checkpoint.step == NUM_STEPS
    found: dict[str, torch.Tensor] = load_file(checkpoint.model_path / "model.safetensors")
    return found


def assert_equal(one: Path, other: Path) -> None:
    expected = weights(other)
    for name, value in weights(one).items():
        assert torch.equal(value, expected[name]), name


def counts(found: dict[str, Any]) -> tuple[int, int, int]:
    return found["num_records"], found["num_groups"], found["num_steps"]


async def ledgers(store: TrajectoryStore) -> dict[str, Document]:
    found = await store.database["record_data"].find({"split": "train"}).to_list()
    return {one["_id"]: one["ledger"] for one in found}


async def trainings(store: TrajectoryStore) -> list[Document]:
    used = {"position": {"$ne": None}}
    return await store.database["turn_training"].find(used).to_list()


def test_all_steps_are_the_runs_own_bit_for_bit(
    trained: RootConfig, mongo_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(retrained(trained, "again", "--json")) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["steps"] == [1, 2, 3, 4, 5]
    assert counts(found) == (0, 0, 0)
    output = trained.run.output_path
    assert_equal(output.parent / "again", output)
    assert all(one["again"] == one["trainer"] for one in in_store(mongo_uri, ledgers).values())
    made = read_metrics(output.parent / "again")
    for step, figures in read_metrics(output).items():
        timed = ("seconds", "time", "tokens_per_second", "tflops", "mfu", "masked_tokens")
        assert made[step].model_dump(exclude={*timed}) == figures.model_dump(exclude={*timed})
    of_run: dict[str, Document] = {}
    of_retrain: dict[str, Document] = {}
    for one in in_store(mongo_uri, trainings):
        values = {name: value for name, value in one.items() if name not in ("_id", "consumer")}
        (of_run if one["consumer"] == "trainer" else of_retrain)[
            f"{one['step']}/{one['turn_id']}"
        ] = values
    assert of_retrain == of_run
    # And from the retrained run's own directory, as from any other.
    database = retrained(trained, "again")[-2:]
    assert main(["replay", str(output.parent / "again"), "--step", "2-5", *database]) == 0


def test_the_records_of_a_condition_are_left_out(
    trained: RootConfig,
    mongo_uri: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    capfd.readouterr()
    assert main(retrained(trained, "clean", "--without", WITHOUT, "--json")) == 0
    found = json.loads(capfd.readouterr().out)
    name = trained.run.run_name
    assert found["origin"] == {
        "run": name,
        "consumer": "trainer",
        "checkpoint": 2,
        "last_step": 5,
        "without": WITHOUT,
    }
    assert counts(found) == (4, 4, 3)
    # Left out was the only right answer of one group of step 3, and of both of step 4.
    assert (found["num_emptied_groups"], found["emptied_steps"]) == (3, [4])
    assert found["steps"] == [3, 5]

    async def read_run(store: TrajectoryStore) -> Run | None:
        return await store.runs.get()

    run: Run = in_store(mongo_uri, read_run)
    assert run.retrains["clean"].model_dump() == found["origin"]
    own = {one: ledger["clean"] for one, ledger in in_store(mongo_uri, ledgers).items()}
    left_out = {one for one, entry in own.items() if entry.get("reason") == "left_out"}
    assert left_out == set(BAD)
    # What the weights of the checkpoint had seen is in the ledger, too.
    assert own["train/0/q0/0"]["trained_at"] == [1]
    made = [one for one in in_store(mongo_uri, trainings) if one["consumer"] == "clean"]
    assert {(one["step"], one["task_id"].rpartition("/")[2]) for one in made} == {
        (3, "q6"),
        (5, "q9"),
        (5, "q10"),
    }
    # Two of q9 remain, of scores 1 and 0, each compared with the other alone.
    advantages = {one["record_id"]: one["advantage"] for one in made if one["step"] == 5}
    assert advantages["train/0/q9/0"] == 1.0
    assert advantages["train/0/q9/2"] == -1.0

    # Its policy is not the one that sampled, so large ratios are bounded, also when a step is replayed.
    assert "dual_clip: 3.0" in (trained.run.output_path.parent / "clean/config.yaml").read_text()
    replayed = ["replay", str(trained.run.output_path.parent / "clean"), "--step", "5"]
    assert main([*replayed, *retrained(trained, "clean")[-2:]]) == 0
    capfd.readouterr()

    # From the first weights, the same is left out, and the same comes out.
    for path in (trained.run.output_path / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    assert main(retrained(trained, "from_0", "--without", WITHOUT)) == 0
    printed = capfd.readouterr().out
    assert f"from_0 repeats {name} after step 0, without {WITHOUT}\n" in printed
    assert (
        "left out: 4 records of 4 groups in 3 steps; nothing left of 3 groups and 1 step\n"
        in printed
    )
    output = trained.run.output_path
    assert_equal(output.parent / "from_0", output.parent / "clean")
    changed = weights(output.parent / "clean")
    (tmp_path / "000005").rename(output / "checkpoints/000005")
    assert any(not torch.equal(value, changed[name]) for name, value in weights(output).items())


KILLED = """
import os, signal, sys
from agentrl.cli.main import main
from agentrl.trainer.rl import retrain, training_loop

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "before":
    retrain._Own._write_start = die
else:
    log_step = training_loop.log_step
    training_loop.log_step = lambda metrics, last: (
        die() if metrics.step == int(sys.argv[1]) else log_step(metrics, last)
    )
main(sys.argv[2:])
"""


@pytest.mark.timeout(900)
def test_killed_it_goes_on_and_trains_nothing_twice(
    trained: RootConfig, mongo_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    without = ("--without", 'record = "train/0/q3/1"')
    words = retrained(trained, "killed", *without, "--json")
    # Before its first step, and after one whose checkpoint is not written yet.
    for moment in ("before", "3"):
        done = subprocess.run([sys.executable, "-c", KILLED, moment, *words], capture_output=True)
        assert done.returncode == -9, done.stderr.decode()[-2000:]
    capfd.readouterr()
    assert main(words) == 0
    first = json.loads(capfd.readouterr().out)
    assert first["steps"] == [1, 2, 3, 4, 5]
    assert main(retrained(trained, "whole_way", *without, "--json")) == 0
    output = trained.run.output_path
    assert_equal(output.parent / "killed", output.parent / "whole_way")
    for one in in_store(mongo_uri, ledgers).values():
        assert one["killed"] == one["whole_way"]
        assert one["killed"].get("trained_count", 0) <= 1
    # Once it is done, the same command says the same again.
    capfd.readouterr()
    assert main(words) == 0
    assert json.loads(capfd.readouterr().out) == first


def test_mistakes_are_one_line_and_change_nothing(
    trained: RootConfig, mongo_uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        capfd.readouterr()
        assert main([*words]) == 2
        errors = [
            line for line in capfd.readouterr().err.splitlines() if line.startswith("agentrl ")
        ]
        assert len(errors) == 1
        return errors[0]

    output = trained.run.output_path
    before = in_store(mongo_uri, ledgers)
    database = retrained(trained, "clean")[-2:]
    assert "name the new weights: --run_name" in refused("retrain", str(output), *database)
    assert "no run 'nowhere' here" in refused("retrain", "nowhere", "--run_name", "clean")
    assert "trained on has 'score > 7'" in refused(
        *retrained(trained, "clean", "--without", "score > 7")
    )
    assert "is not a condition" in refused(*retrained(trained, "clean", "--without", "timeouts"))
    assert "lower-case letters" in refused(*retrained(trained, "Clean-2"))
    (output.parent / "taken").mkdir()
    assert "exists and is no retrain of" in refused(*retrained(trained, "taken"))
    assert "exists and is no retrain of" in refused(*retrained(trained, "trainer"))

    async def expire(store: TrajectoryStore) -> None:
        await store.retention.expire(["train/0/q3"])
        await store.retention.finish_step(2)

    assert main(retrained(trained, "clean", "--without", WITHOUT)) == 0
    other = refused(*retrained(trained, "clean", "--without", "score = 1"))
    assert f"--run_name clean is a retrain of {trained.run.run_name} after step 2" in other
    for path in (output / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    moved = Path(trained.model.model_name_or_path).rename(tmp_path / "moved")
    assert "model_name_or_path" in refused(*retrained(trained, "clean2"))
    moved.rename(trained.model.model_name_or_path)
    in_store(mongo_uri, expire)
    gone = refused(*retrained(trained, "clean2", "--without", WITHOUT))
    assert "step 2" in gone
    after = in_store(mongo_uri, ledgers)
    for record, entries in before.items():
        assert {k: v for k, v in after[record].items() if k != "clean"} == entries
    assert not (output.parent / "clean2").exists()


@pytest.mark.timeout(900)
def test_the_commands_of_the_page_are_ones_that_work(
    trained: RootConfig, tmp_path: Path, mongo_uri: str
) -> None:
    trained.run.output_path.rename(tmp_path / "output/demo")
    _, commands = write_blocks("retrain.md", tmp_path)
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "MONGODB_URI": mongo_uri, "PATH": programs}
    printed = [run_shell(text, tmp_path, environment, seconds=300) for text in commands]
    assert printed[0].startswith(f"clean repeats {trained.run.run_name} after step 2, without ")
    assert "left out: 4 records of 4 groups in 3 steps" in printed[0]
    assert len({line.split()[0] for line in printed[1].splitlines()[-2:]}) == 1
    # Of one group, two different scores remain.
    assert "1 step made again, up to step 5" in printed[2]
    assert "step 5: equal, weights equal" in printed[3]

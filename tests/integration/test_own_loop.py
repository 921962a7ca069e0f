"""The example of a loop of one's own: all processes, for real, and its own is killed in the middle."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.command_lines import words_of
from support.demo_run import ROOT, logs
from support.patience import PATIENCE

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_STEPS, GROUPS_PER_STEP, NUM_GENERATIONS = 4, 2, 4
OWN_LOOP = ROOT / "examples/own_algorithm/own_loop.py"


def command(folder: Path) -> list[str]:
    flags = {
        "config": ROOT / "assets/demo/grpo.yaml",
        "output_dir": folder / "output",
        "logs_dir": folder / "logs",
        "mongo_data_dir": folder / "mongo",
        "mongo_port": 0,
        "groups_per_step": GROUPS_PER_STEP,
        "num_generations": NUM_GENERATIONS,
        "eval_strategy": "no",
        "lease_seconds": 3,
        "max_steps": NUM_STEPS,
        "save_steps": 2,
        "trainer_lease_seconds": 5,
    }
    return [sys.executable, str(OWN_LOOP), *words_of(flags, folder)]


def steps_done(folder: Path) -> list[int]:
    path = folder / "output/metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [step["step"] for step in map(json.loads, lines) if "step" in step]


def kill_after(step: int, folder: Path) -> None:
    """Start the loop, and kill it once it has made a step."""
    with (folder / "first.txt").open("wb") as output:
        loop = subprocess.Popen(
            command(folder), cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 2 * PATIENCE
        while step not in steps_done(folder):
            assert loop.poll() is None, (folder / "first.txt").read_text() + logs(folder)
            assert time.monotonic() < deadline, logs(folder)
            time.sleep(0.05)
    finally:
        loop.send_signal(signal.SIGKILL)
        loop.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE)
async def test_a_killed_loop_goes_on_with_the_same_command_and_a_clean_ledger(
    tmp_path: Path,
) -> None:
    """Killed after step 3: the checkpoint is of step 2, so that step 3 is repeated."""
    kill_after(3, tmp_path)
    again = subprocess.run(
        command(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert again.returncode == 0, again.stderr + logs(tmp_path)
    assert steps_done(tmp_path) == [1, 2, 3, 4]
    summary = json.loads((tmp_path / "output/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("own_loop")) as store:
            run = await store.runs.get()
            assert run is not None
            assert (run.status, run.step) == ("completed", NUM_STEPS)
            assert run.config["loss_calculator"] == f"{OWN_LOOP}:grpo"
            data = await store.database["record_data"].find({"split": "train"}).to_list()
    entries = [one["ledger"]["trainer"] for one in data if one.get("ledger")]
    entries = [entry for entry in entries if "status" in entry]  # others were ready once more
    assert {entry["status"] for entry in entries} <= {"ready", "trained", "dropped"}
    trained = Counter(entry["step"] for entry in entries if entry["status"] == "trained")
    assert sorted(trained) == [1, 2, 3, 4]
    assert {entry["trained_count"] for entry in entries if entry["status"] == "trained"} == {1}

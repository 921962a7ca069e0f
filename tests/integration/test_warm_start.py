"""`--warm_start`: one command fine-tunes on demonstrations and trains on from the result."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from support.demo_run import ROOT, config_path, logs, run_command

DEMONSTRATIONS = ROOT / "examples/shop/demonstrations.py"


def start(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def tuning(folder: Path, **flags: object) -> Path:
    path = folder / "sft.yaml"
    settings = {"train_file": str(DEMONSTRATIONS), "max_steps": 2, "learning_rate": 1e-4}
    path.write_text(yaml.safe_dump(settings | flags))
    return path


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_run_starts_from_what_its_fine_tuning_made_and_does_so_once(tmp_path: Path) -> None:
    command = run_command(tmp_path, max_steps=1, warm_start=tuning(tmp_path))
    first = start(command, tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr + logs(tmp_path)
    assert "warm start: fine-tuning with" in first.stdout
    assert "warm start: step 2/2" in first.stdout
    warm = tmp_path / "output-warm"
    assert json.loads((warm / "summary.json").read_text())["status"] == "completed"
    written = yaml.safe_load(config_path(tmp_path).read_text())
    assert written["model_name_or_path"] == str(warm / "model")
    assert "warm_start" not in written  # what joins the run, or repeats it, must not fine-tune

    again = start([*command, "--max_steps", "2"], tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr + logs(tmp_path)
    assert f"warm start: continuing from the model in {warm}/model" in again.stdout
    assert "fine-tuning with" not in again.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train_file": "nothing.jsonl"}, "nothing.jsonl"),
        ({"learning_rat": 1}, "unknown flag --learning_rat; did you mean --learning_rate?"),
        ({"train_file": str(ROOT / "examples/shop/server.py")}, "no function demonstrations()"),
    ],
)
@pytest.mark.timeout(60)
def test_a_mistake_in_the_fine_tuning_is_one_line_before_anything_starts(
    tmp_path: Path, flags: dict[str, object], message: str
) -> None:
    path = tuning(tmp_path, **flags)
    found = start(run_command(tmp_path, max_steps=1, warm_start=path), tmp_path)
    assert found.returncode == 2, found.stdout + found.stderr
    assert f"--warm_start {path}: " in found.stderr
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "output").exists()

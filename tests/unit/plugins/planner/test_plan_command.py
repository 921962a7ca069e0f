"""`agentrl plan`: mistakes cost a line, and a plan is that of the trainer's own code."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.runtime import gpus

ROOT = Path(__file__).parents[4]
DEMO = ROOT / "assets/demo"

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--gpu", "H100"), "--gpu H100: give the number of GPUs with --num_gpus"),
        (("--gpu", "GTX 970", "--num_gpus", "8"), "--gpu GTX 970: unknown GPU; known: B200, H200"),
        (("--num_gpus", "8"), "GPU model unknown; name a similar one with --gpu"),
        (("--model_name_or_path", "nowhere"), "no such directory"),
        (("--host_memory_gb", "0"), "0.0 is not in the range x>0"),
        (("--host_memory_gb", "nan"), "nan is not a number"),
    ],
)
def test_a_mistake_costs_one_line(
    flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = () if "--model_name_or_path" in flags else ("--model_name_or_path", str(DEMO / "model"))
    assert main(["plan", *given, *flags]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", "--json", *flags])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


@pytest.mark.slow
def test_a_model_that_is_only_described_is_planned_for_eight_gpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = folder / "described"
    described.mkdir()
    (described / "config.json").write_bytes((DEMO / "model/config.json").read_bytes())
    flags = ("--model_name_or_path", str(described), "--gpu", "A100", "--num_gpus", "8")
    status, found = plan(
        capsys,
        *flags,
        *("--trainer_gpus", "0-3", "--inference_backend", "sglang", "--bf16"),
        *("--max_tokens", "8192"),
    )
    assert status == 0
    assert found["trainer"]["ranks"] == 4
    assert found["servers"]["servers"] == 4
    trained = found["trainer"]["num_trained"]
    # float32, divided over four ranks in blocks of 512 bytes.
    assert 1 <= found["trainer"]["weights"] / trained < 1.1
    assert found["trainer"]["optimizer"] == pytest.approx(2 * found["trainer"]["weights"], rel=0.05)
    small = ("--gpu_memory_gb", "2.4", "--max_tokens", "16384", "--gradient_checkpointing", "false")
    status, found = plan(capsys, *flags, *small, "--inference_backend", "sglang")
    assert status == 2
    assert found["trainer"]["peak"] > found["trainer"]["device_bytes"]


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = folder / "nvidia-smi"
    small.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 1990, 0'\n")
    small.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    assert [gpu.total_mib for gpu in gpus.machine_gpus()] == [1990]
    model, questions = str(DEMO / "model"), str(DEMO / "train.jsonl")
    flags = ("--model_name_or_path", model, "--train_file", questions, "--default_scorer", "exact")
    assert main(["run", "--run_name", "small", *flags]) == 2
    said = capsys.readouterr().err
    assert "agentrl run: a trainer rank needs" in said
    assert "(`agentrl plan` shows the parts)" in said
    assert {path.name for path in folder.iterdir()} == {"nvidia-smi"}
    assert main(["run", "--run_name", "small", *flags, "--dry_run", "--json"]) == 2
    parts = json.loads(capsys.readouterr().out)
    assert parts["memory"]["fits"] is False

"""`agentrl run --dry_run`: what a start would do, and that nothing is done."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "assets/demo"

pytestmark = pytest.mark.usefixtures("folder")


def plan(capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    assert main(["run", "--run_name", "dry", "--dry_run", "--json", *flags]) == status
    parts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert parts["can_start"] is (status == 0)
    return parts


def test_every_value_has_its_origin_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "own.yaml"
    own.write_text(f"model_name_or_path: {DEMO}/model\ntrain_file: {DEMO}/train.jsonl\ntop_k: 7\n")
    parts = plan(
        capsys,
        *("--config", str(own), "--lr", "0.5", "--bf16", "--adam_beta1", "0.8"),
        *("--agent_config_path", str(ROOT / "assets/agent_config.yml")),
        *("--preferred_sampling_params", '{"min_p": 0.1}', "--default_scorer", "exact"),
        *("--recipe", "dapo", "--kl_coefficient", "0.1"),
    )
    values = parts["configuration"]
    found = {name: (entry["value"], entry["origin"]) for name, entry in values.items()}
    assert found["learning_rate"] == (0.5, "flag")
    assert found["torch_dtype"] == ("bfloat16", "flag")
    assert found["optim_args"] == ("beta1=0.8", "flag")
    assert found["min_p"] == (0.1, "flag")
    assert found["top_k"] == (7, f"file {own}")
    assert found["epsilon"] == (0.2, "recipe dapo")
    assert found["kl_coefficient"] == (0.1, "flag")
    assert found["lora_alpha"] == (32, "default")
    # The demo's model has a context of 2048 tokens.
    assert found["max_prompt_tokens"] == (1536, "derived")
    assert {path.name for path in folder.iterdir()} == {"own.yaml"}
    assert [check["problem"] for check in parts["checks"]] == [None] * len(parts["checks"])


def test_the_demo_on_a_machine_with_two_gpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--run_name", "dry", "--dry_run", "--num_gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "trainer      rank 0 on GPU 0" in text
    assert "others       GPU 1" in text
    assert "2 x sampler" in text
    assert "file assets/demo/grpo.yaml" in text
    assert not list(folder.iterdir())


def test_all_problems_are_shown_and_the_status_is_that_of_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.jsonl").write_text("{oops\n")
    flags = ["--train_file", "bad.jsonl", "--model_name_or_path", "./nowhere", "--num_gpus", "1"]
    parts = plan(capsys, *flags, "--num_processes", "2", "--agent", "none.py:play", status=2)
    problems = {check["subject"]: check["problem"] for check in parts["checks"]}
    assert "2 trainer ranks need one GPU each" in problems["GPUs"]
    assert "./nowhere: no such directory" in problems["model"]
    assert "line 1: not valid JSON" in problems["questions"]
    assert "none.py" in problems["agent"]
    assert problems["database"] is None
    assert main(["run", "--run_name", "dry", *flags]) == 2
    assert "./nowhere" in capsys.readouterr().err


def test_secrets_are_not_shown(mongo_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--db_connection_string", mongo_uri, "--mcp_auth_token", "t0ken"]
    parts = plan(capsys, *flags, "--train_file", str(DEMO / "train.jsonl"))
    assert parts["configuration"]["db_connection_string"] == {"value": "***", "origin": "flag"}
    assert parts["configuration"]["mcp_auth_token"]["value"] == "***"
    assert mongo_uri.split("@")[0].rpartition(":")[2] not in json.dumps(parts)


def test_several_machines_are_refused_with_what_starts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUM_MACHINES", "2")
    problems = [check["problem"] or "" for check in plan(capsys, status=2)["checks"]]
    assert any("on each machine with torchrun" in problem for problem in problems)


def test_json_is_for_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json"]) == 2
    assert "--json requires --dry_run" in capsys.readouterr().err

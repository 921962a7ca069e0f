"""A run whose answers are all wrong: what it says, and how it ends if the user asked to stop."""

import json
import subprocess
from pathlib import Path

import pytest
from support.demo_run import ROOT, logs, run_command


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_answers_that_are_all_wrong_end_a_run_that_requires_a_signal(tmp_path: Path) -> None:
    lines = (ROOT / "assets/demo/train.jsonl").read_text().splitlines()[:40]
    questions = [json.loads(line) | {"answer": "unattainable"} for line in lines]
    path = tmp_path / "wrong.jsonl"
    path.write_text("\n".join(map(json.dumps, questions)))
    command = run_command(tmp_path, train_file=path, max_steps=2)
    ended = subprocess.run(
        [*command, "--require_signal"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 3, ended.stdout + ended.stderr + logs(tmp_path)
    assert "mean score 0.000" in ended.stdout
    assert "all answers have the same score: there is nothing to learn from yet" in ended.stdout
    assert "what to try: demonstrations first: --warm_start" in ended.stdout
    assert "--require_signal: the first answers give nothing to learn from" in ended.stderr
    summary = json.loads((tmp_path / "output/summary.json").read_text())
    assert summary["status"] == "no_signal"
    assert summary["steps"] == 0

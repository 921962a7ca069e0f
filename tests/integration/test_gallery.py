"""The gallery's examples that train the tiny model, as their files run: the reward rises."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from support.agent_venvs import python_with

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.mark.parametrize(("kind", "least_rise"), [("reasoning_gym", 0.2), ("textarena", 0.04)])
def test_the_reward_of_an_example_rises(tmp_path: Path, kind: str, least_rise: float) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    packages = tmp_path / ".agentrl/environments" / kind
    packages.parent.mkdir(parents=True)
    packages.symlink_to(python_with(kind).parents[1])
    command: list[str | Path] = [
        sys.executable,
        ROOT / f"examples/environments/train_{kind}.py",
        "20",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = json.loads(done.stdout.splitlines()[-1])
    assert len(rewards) == 20
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + least_rise, rewards

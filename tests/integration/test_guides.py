"""The guides on coding tasks and reward design, as somebody types them in an empty folder."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.doc_blocks import run_shell, write_blocks

from agentrl.runtime.processes.wall import wall_gap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def as_printed(page: str, folder: Path) -> list[str]:
    """Return what the page's commands printed."""
    _, commands = write_blocks(page, folder)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths}
    return [run_shell(text, folder, environment, seconds=400) for text in commands]


@pytest.mark.skipif(wall_gap() is not None, reason="needs namespaces")
def test_coding_tasks(tmp_path: Path) -> None:
    printed = as_printed("coding-tasks.md", tmp_path)
    checks = printed[-1]
    assert "tools              ok" in checks
    assert "questions          ok" in checks
    assert "PROBLEM" not in checks


def test_reward_design(tmp_path: Path) -> None:
    _, winners, rescored = as_printed("reward-design.md", tmp_path)
    assert "train/0/" in winners
    assert "train/0/" in rescored
    assert json.loads((tmp_path / "output/hacked/summary.json").read_text())["steps"] == 2

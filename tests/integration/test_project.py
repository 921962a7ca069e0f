"""The README of a project that `agentrl init` makes: every command of it, as printed and in order."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.doc_blocks import run_shell

from agentrl.cli.main import main
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    readme = (tmp_path / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "PATH": paths}
    printed = [run_shell(block, tmp_path, environment, seconds=500) for block in blocks]
    assert "step    3/3" in printed[0]
    for words in (
        "status  completed, policy version 3",
        "train/0/q12/0  trained",
        "candles: packs once 4 arrive?",
        "training  step 1 of trainer",
        "conversations in out: 96 of train",
    ):
        assert words in printed[1]
    summary = json.loads((tmp_path / "output/first/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 20)
    assert list(read_demonstrations(tmp_path / "out/train.jsonl"))

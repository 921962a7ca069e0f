"""Every block of docs/second-hour.md, as somebody types it in an empty folder."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.doc_blocks import run_shell, write_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_block_of_the_second_hour_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    num_blocks, commands = write_blocks("second-hour.md", tmp_path)
    assert (num_blocks, len(commands)) == (16, 7)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths}
    printed = [run_shell(text, tmp_path, environment, seconds=400) for text in commands]
    assert "tools              ok" in printed[1]
    assert "PROBLEM" not in printed[1]
    assert re.search(r"train/0/line\d+/\d  trained", printed[3]), printed[3]
    for name in ("stall", "agent", "others"):
        summary = json.loads((tmp_path / f"output/{name}/summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("completed", 3), name

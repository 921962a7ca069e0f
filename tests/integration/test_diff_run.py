"""docs/diff.md as somebody types it in an empty folder: a run, then what its training changed."""

import os
import sys
from pathlib import Path

import pytest
from support.doc_blocks import run_shell, write_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_block_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    num_blocks, commands = write_blocks("diff.md", tmp_path)
    assert (num_blocks, len(commands)) == (5, 4)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths}
    trained, low, gate, scripted = (
        run_shell(text, tmp_path, environment, seconds=400) for text in commands
    )
    for printed in (trained, low, gate):
        assert "run shop: 0 -> 10" in printed
        for choice in ("answer", "price", "stock", "add", "subtract", "multiply"):
            assert f"\n{choice} " in printed
    assert "outcome" in low
    assert "right" not in low.partition("outcome")[2]
    assert "calls per decision" in scripted

"""docs/stored-turns.md as somebody types it in an empty folder: a run, then others from its turns."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.doc_blocks import run_shell, write_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_block_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    num_blocks, (earlier, late) = write_blocks("stored-turns.md", tmp_path)
    assert num_blocks == 2
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths}
    run_shell(earlier, tmp_path, environment, seconds=500)
    run_shell(late, tmp_path, environment, seconds=300)
    tokens = {}
    for name, num_steps in (("errands", 4), ("backward", 4), ("late", 2)):
        lines = (tmp_path / f"output/{name}/metrics.jsonl").read_text().splitlines()
        assert len(lines) == num_steps
        steps = [json.loads(line) for line in lines]
        sampled = sum(step["num_output_tokens"] for step in steps)
        tokens[name] = sampled / sum(step["num_records"] for step in steps)
    # What comes before the states is given.
    assert max(tokens["backward"], tokens["late"]) < 0.75 * tokens["errands"]

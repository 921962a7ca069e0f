"""All ranks learn the times of the slowest."""

from pathlib import Path

import pytest
from support.gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_the_slowest_rank_of_each_packing_counts(tmp_path: Path) -> None:
    run_ranks("timed_ranks.py", 2, tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[5.0, 3.0]"] * 2

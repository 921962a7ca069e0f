"""A function that is wrong on one machine ends all ranks before the first step, with its line."""

import os
from pathlib import Path

import pytest
from support.gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed

LOSS = """
def loss(inputs):
    return -(inputs.policy_logprobs * inputs.advantages)
"""
HOST = os.uname().nodename


@pytest.mark.parametrize(
    ("of_rank_1", "expected"),
    [
        (
            None,
            f"rank 1 ({HOST}): --loss_calculator: rank_loss: ModuleNotFoundError: No module named "
            "'rank_loss'",
        ),
        (
            LOSS.replace("-(", "(0.5 * "),
            f"rank 1 ({HOST}): --loss_calculator rank_loss:loss: its source is not that of rank 0; copy "
            "the file to all machines",
        ),
    ],
    ids=["missing", "another-source"],
)
def test_each_rank_tells_which_rank_lacks_the_function(
    tmp_path: Path, of_rank_1: str | None, expected: str
) -> None:
    for rank, source in enumerate([LOSS, of_rank_1]):
        (tmp_path / str(rank)).mkdir()
        if source is not None:
            (tmp_path / str(rank) / "rank_loss.py").write_text(source)
    run_ranks("rank_functions.py", 2, tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [expected] * 2

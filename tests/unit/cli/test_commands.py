import json
from pathlib import Path

import pytest
import torch
from support.training import write_model

from agentrl.cli.main import main

torch.set_num_threads(1)


def test_merged_training_is_exact_on_random_trees(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["merge", "--seed", "5", "--trees", "2", "--dtype", "float64", "--json"]
    assert main(["verify", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trees"] == 2
    assert report["max_relative_gradient_error"] <= 1e-12
    assert set(report["by_packing"]) == {"tree", "linear", "bins", "chunks"}
    assert report["tokens_merged"] < report["tokens_separate"]


def test_any_checkpoint_can_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    arguments = ["merge", "--trees=1", "--dtype=float32", "--model_name_or_path", str(model)]
    assert main(["verify", *arguments]) == 0
    assert str(model) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say `agentrl verify` and one of merge"),
        (["merge", "--trees", "0"], "'--trees': 0 is not in the range x>=1"),
        (["merge", "--dtype", "int8"], "'int8' is not one of 'float64', 'float32'"),
    ],
)
def test_a_wrong_flag_ends_with_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1

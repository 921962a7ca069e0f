"""`agentrl teach` reads its command line before it needs anything else."""

from pathlib import Path

import pytest

from agentrl.cli.main import main


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["none", "--teacher", "big"], "--teacher big: give NAME=URL or NAME=PATH"),
        (
            ["none", "--teacher", "big=/m", "--teacher_prompt", "{anwser}"],
            "--teacher_prompt: {anwser} stands for nothing; known are solution, feedback, answer",
        ),
        (["none", "--teacher", "big=/models/big"], "no run 'none' here"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["teach", *words]) == 2
    assert problem in capsys.readouterr().err

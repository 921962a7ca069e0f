"""`agentrl teach` reads its command line before it needs anything else."""

from pathlib import Path

import pytest

from agentrl.cli.databases import opened_store
from agentrl.cli.main import main
from agentrl.config.command_line import parse_flags
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["none", "--teacher", "big"], "--teacher big: give NAME=URL or NAME=PATH"),
        (
            ["none", "--teacher", "big=/m", "--teacher_prompt", "{anwser}"],
            "--teacher_prompt: {anwser} stands for nothing; known are solution, feedback, answer",
        ),
        (["none", "--teacher", "big=/models/big"], "no run 'none' here"),
        (["none", "--teacher", "big=/m", "--solution_score", "nan"], "nan is not a number"),
        (["none", "--teacher", "big=/m", "--solution_score", "-inf"], "-inf is not a number"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["teach", *words]) == 2
    assert problem in capsys.readouterr().err


async def test_a_run_that_starts_later_is_waited_for_where_its_database_is_served(
    mongo_uri: str, tmp_path: Path
) -> None:
    served = parse_flags(["--db_connection_string", mongo_uri])
    async with opened_store(served, also_unstarted=True) as store:
        assert await store.runs.get() is None
    with pytest.raises(ConfigError, match="contains no run"):
        async with opened_store(served):
            pass
    (tmp_path / "mongo").mkdir()
    alone = parse_flags(["--run_name", "mine", "--mongo_data_dir", str(tmp_path / "mongo")])
    with pytest.raises(ConfigError, match="contains no run"):
        async with opened_store(alone, also_unstarted=True):
            pass

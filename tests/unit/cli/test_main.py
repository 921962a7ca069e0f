import subprocess
import sys
import time

import pytest

from agentrl.cli.main import COMMANDS, main


def test_help_takes_less_than_a_second_and_names_every_command() -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--help"], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 1.0
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    # The tools' environment belongs to no run.
    flag = "--mcp_servers" if command == "env" else "--run_name"
    assert flag in capsys.readouterr().out


def test_an_unknown_command_is_named_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rnu"]) == 2
    assert "unknown command 'rnu'; one of run, sample" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(COMMANDS))
def test_an_unknown_flag_ends_every_command_with_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--max_step", "3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean --max_steps?" in error
    assert error.count("\n") == 1

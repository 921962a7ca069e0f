"""What a run's console does when nobody can read it any more."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.launcher.console.run_report import FailSafeOutput, run_console


def test_a_closed_pipe_is_reported_once_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        console = Console(file=FailSafeOutput(stream))  # type: ignore[arg-type]
        console.print("step 1")
        assert os.read(reader, 100) == b"step 1\n"
        os.close(reader)
        for _ in range(3):
            console.print("step 2")
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "standard output: Broken pipe"
    ]


def test_a_full_disk_ends_the_output_only(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w") as stream:
        console = Console(file=FailSafeOutput(stream))  # type: ignore[arg-type]
        console.print("step 1")
        console.print("step 2")
    assert "No space left on device" in caplog.text
    assert len(caplog.records) == 1


def test_the_console_of_a_run_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run_console().print("step 1")
    assert capsys.readouterr().out == "step 1\n"

"""Messages name the command as their reader can type it."""

import sys
from pathlib import Path

import pytest

from agentrl.runtime.installation import typed_command


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a virtual environment below the working directory, not on the PATH."""
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "agentrl"):
        (programs / name).touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    return programs


def test_it_is_the_script_of_this_environment(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed_command("store", "up") == ".venv/bin/agentrl store up"
    assert typed_command("inspect", "record", "a b") == ".venv/bin/agentrl inspect record 'a b'"
    monkeypatch.chdir("/usr")
    assert typed_command("run") == f"{environment}/agentrl run"


def test_on_the_path_it_is_the_bare_name(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(environment))
    assert typed_command("run") == "agentrl run"
    other = tmp_path / "other"
    other.mkdir()
    (other / "agentrl").touch(0o755)
    monkeypatch.setenv("PATH", str(other))  # somebody else's command of that name
    assert typed_command("run") == ".venv/bin/agentrl run"


def test_without_a_script_it_is_the_interpreter(environment: Path) -> None:
    (environment / "agentrl").unlink()
    assert typed_command("run") == ".venv/bin/python -m agentrl run"

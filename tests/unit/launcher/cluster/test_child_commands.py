import sys
from pathlib import Path

import pytest

from agentrl.config.loading import build_config
from agentrl.launcher.cluster.child_commands import tool_server_command, trainer_command
from agentrl.runtime.processes.child_processes import program

ROOT = Path(__file__).parents[4]


def test_commands_find_shipped_files_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_config({"num_processes": 2})

    trainer = trainer_command(config.trainer, tmp_path / "config.yaml")

    assert str(ROOT / "assets/fsdp2_dst.yml") in trainer
    assert tool_server_command("python examples/shop/server.py --port {port}", 81) == [
        sys.executable,
        str(ROOT / "examples/shop/server.py"),
        *("--port", "81"),
    ]


@pytest.mark.parametrize("script", ["-m", "server.py", "./server.py"])
def test_other_scripts_stay_as_they_are(script: str) -> None:
    assert tool_server_command(f"python {script} x", 81) == [sys.executable, script, "x"]


def test_programs_of_this_environment_are_found_where_it_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "env/bin"
    beside.mkdir(parents=True)
    (beside / "mcp-server-x").touch()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    assert program("python3") == str(beside / "python")
    assert program("mcp-server-x") == str(beside / "mcp-server-x")
    assert program("sh") == "sh"
    assert program("no-such-program") == "no-such-program"

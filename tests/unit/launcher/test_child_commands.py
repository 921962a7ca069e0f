import sys
from pathlib import Path

import pytest

from agentrl.config.loading import build_config
from agentrl.launcher.child_commands import tool_server_command, trainer_command

ROOT = Path(__file__).parents[3]


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

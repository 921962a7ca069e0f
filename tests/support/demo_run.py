"""Starts the demo from the command line, cut short, in a folder of its own."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.command_lines import words_of

from agentrl.store.database import with_database
from agentrl.store.private_mongod import running_uri

ROOT = Path(__file__).parents[2]
RUN_NAME = "short"


def run_command(folder: Path, **flags: object) -> list[str]:
    """Return the command of a short run whose files all lie in `folder`."""
    named = {"run_name": RUN_NAME, "config": ROOT / "assets/demo/grpo.yaml", "lease_seconds": 3}
    return [sys.executable, "-m", "agentrl", "run", *_words(folder, named | flags)]


def script_command(folder: Path, **flags: object) -> list[str]:
    """Return the same as a user types it; the script needs the environment of `scripts/setup`."""
    return [_script("grpo"), RUN_NAME, *_words(folder, flags)]


def eval_script_command(folder: Path, **flags: object) -> list[str]:
    """Return how a user evaluates what a run left in `folder`."""
    return [_script("eval"), RUN_NAME, *_words(folder, flags)]


def _script(name: str) -> str:
    if not (ROOT / ".venv/bin/agentrl").exists():
        pytest.skip(f"{name}_example.sh would install AgentRL first; scripts/setup does it")
    return str(ROOT / f"{name}_example.sh")


def _words(folder: Path, flags: Mapping[str, object]) -> list[str]:
    settings: Mapping[str, object] = {
        "output_dir": folder / "output",
        "logs_dir": folder / "logs",
        "mongo_data_dir": folder / "mongo",
        "mongo_port": 0,
        "groups_per_step": 4,
        "num_generations": 4,
        "eval_strategy": "no",
        "save_steps": 1,
    }
    return words_of({**settings, **flags}, folder)


def config_path(folder: Path) -> Path:
    """Return the resolved configuration that further samplers are started with."""
    return folder / "output/config.yaml"


def database_uri(folder: Path) -> str:
    """Return the connection string of a run that goes on."""
    uri = running_uri(folder / "mongo")
    assert uri is not None, "the run's mongod is not up"
    return with_database(uri, RUN_NAME)


def logs(folder: Path) -> str:
    """Return the ends of all log files."""
    return "".join(
        f"== {path.name}\n{path.read_text()[-2000:]}\n" for path in (folder / "logs").glob("*.log")
    )

"""Environments of agent frameworks, made once by `scripts/setup_agents` and used again."""

import fcntl
import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(kind: str) -> Path:
    """Return the Python of an environment of `scripts/setup_agents`; workers wait for each other.

    The folder above them is AGENTRL_TEST_VENVS, or one beside other temporary files.
    """
    base = os.environ.get("AGENTRL_TEST_VENVS", tempfile.gettempdir())
    folder = Path(base) / f"agentrl-{kind}"
    environment = dict(os.environ)
    if kind in ("verl", "areal"):
        environment["SITE"] = site.getsitepackages()[0]  # for its torch
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            [ROOT / "scripts/setup_agents", kind, folder], env=environment, check=True, timeout=600
        )
    return folder / "bin/python"


def index_variables(python: Path) -> dict[str, str]:
    """Return the variables by which uv uses pip's indexes: verifiers' harness installs its program."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for ours, theirs in (
        ("find-links", "UV_FIND_LINKS"),
        ("extra-index-url", "UV_EXTRA_INDEX_URL"),
    ):
        asked = [str(python), "-m", "pip", "config", "get", f"global.{ours}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            variables[theirs] = done.stdout.strip()
    return variables


def aworld_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a process with AWorld, whose files go to a folder."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]),
        "AGENTRL_PYTHON": os.environ.get("AGENTRL_PYTHON", sys.executable),
        "AWORLD_LOG_PATH": str(folder / "aworld_logs"),
        "AWORLD_MEMORY_ROOT": str(folder / "aworld_memory"),
        "AWORLD_DISABLE_CONSOLE_LOG": "true",
    }


def verl_that_reads(folder: Path) -> Path:
    """Write and return a Python in which verl, without a GPU to train on, reads what it was given."""
    python = folder / "python"
    real = python_with("verl")
    check = f'exec {real} {ROOT}/tests/support/verl_check.py "$4"'
    python.write_text(f'#!/bin/sh\n[ "$2" = verl.trainer.main_ppo ] && {check}\nexec {real} "$@"\n')
    python.chmod(0o755)
    return python

"""Environments of agent frameworks, made once by `scripts/setup_agents` and used again."""

import os
import site
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(kind: str) -> Path:
    """Return the Python of an environment that holds `aworld`, `verl`, `areal` or `mini`.

    The folder above them is AGENTRL_TEST_VENVS, or one beside other temporary files.
    """
    base = os.environ.get("AGENTRL_TEST_VENVS", tempfile.gettempdir())
    folder = Path(base) / f"agentrl-{kind}"
    environment = dict(os.environ)
    if kind in ("verl", "areal"):
        environment["SITE"] = site.getsitepackages()[0]  # for its torch
    subprocess.run(
        [ROOT / "scripts/setup_agents", kind, folder], env=environment, check=True, timeout=600
    )
    return folder / "bin/python"

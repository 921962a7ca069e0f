"""The research servers of examples/train_gaia, installed once by `scripts/install_desktop`."""

import os
import subprocess
from pathlib import Path

import pytest
from support.agent_venvs import ROOT


def research_programs() -> Path:
    """Return the folder of their programs; skip the test if they cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl/research"
    script = [str(ROOT / "scripts/install_desktop"), "--required", "--research", str(cache)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip()[-200:])
    return cache / "bin"

"""Scripts and notebooks see the message of an error, and nothing of AgentRL's code."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from agentrl import AgentTrainer
from agentrl.errors import ConfigError

def previous(kind, error, traceback):
    print("hook of another library:", kind.__name__)

sys.excepthook = previous
try:
    AgentTrainer()
except ConfigError:
    print("handled")
"""


def ended(program: list[str], text: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *program], input=text, capture_output=True, text=True, check=False
    )


def test_a_script_that_does_not_handle_an_error_ends_with_its_message() -> None:
    done = ended(["-"], f"{SCRIPT}AgentTrainer('agent.py', train_dataset=[{{}}], env='a:b')")
    assert (done.returncode, done.stdout) == (1, "handled\n")
    assert done.stderr == "AgentTrainer: env: a:b provides its own agent; remove agent\n"


def test_other_errors_of_the_script_are_shown_as_before() -> None:
    done = ended(["-"], f"{SCRIPT}1 / 0")
    assert (done.stdout, done.stderr) == (
        "handled\nhook of another library: ZeroDivisionError\n",
        "",
    )


def test_a_notebook_shows_the_message(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cell = "from agentrl import AgentTrainer; AgentTrainer()\n"
    shell = ["-m", "IPython", "--no-banner", "--colors=NoColor", f"--ipython-dir={tmp_path}", "-c"]
    done = ended([*shell, cell], "")
    assert "AgentTrainer: agent: missing; pass" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr

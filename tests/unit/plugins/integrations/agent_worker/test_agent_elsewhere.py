"""An agent whose framework another interpreter alone has."""

import json
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.description import with_agent_elsewhere
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.rollout.agent import load_agent
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint

AGENT = """
import their_framework


async def play(task, endpoint):
    return their_framework.answer(task.query)


def no_agent():
    return None
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with this one's packages, and a framework of its own."""
    folder = tmp_path_factory.mktemp("theirs")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("/src"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in ours]
    (packages / "ours.pth").write_text("\n".join(lines) + "\n")
    (packages / "their_framework.py").write_text("def answer(query):\n    return query.upper()\n")
    return folder / "bin/python"


@pytest.fixture
def configured(python: Path, tmp_path: Path) -> Callable[[str], RootConfig]:
    (tmp_path / "agent.py").write_text(AGENT)
    return lambda name: build_config(
        {"agent": f"{tmp_path / 'agent.py'}:{name}", "agent_python": str(python)}
    )


async def test_the_agent_runs_where_its_framework_is(
    configured: Callable[[str], RootConfig], python: Path, tmp_path: Path
) -> None:
    config = configured("play")
    assert config.agents.agent is not None
    with pytest.raises(ConfigError, match="No module named 'their_framework'"):
        load_agent(config.agents.agent)
    found = with_agent_elsewhere(config, tmp_path / "run")
    assert found.agents.agent_python is None
    assert found.agents.agent is not None
    settings = json.loads((tmp_path / "run/agent_workers.json").read_text())
    assert settings["python"] == str(python)
    play = load_agent(found.agents.agent)
    assert play.__name__ == "play"
    workers = AgentWorkerPool.load(tmp_path / "run/agent_workers.json")
    try:
        result = await workers.run(
            MCPTask(id="train/0/q", query="quiet"), AgentEndpoint("http://127.0.0.1:9", "m", "k")
        )
    finally:
        workers.close()
    assert result.answer == "QUIET"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent", "--agent .*agent.py defines no 'absent'"),
        ("no_agent", r"--agent .*an agent is called with \(task, endpoint\)"),
    ],
)
def test_what_is_no_agent_there_is_refused_in_one_line(
    configured: Callable[[str], RootConfig], tmp_path: Path, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        with_agent_elsewhere(configured(name), tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import os; os._exit(0)", "exits the program, or prints at exit"),
        ("import atexit; atexit.register(print, '[1, 2]')", "or prints at exit"),
        ("import sys; sys.stdin.read(); import time; time.sleep(60)", "did not finish within 3 s"),
    ],
)
def test_a_module_that_says_nothing_of_its_agent_is_refused_in_one_line(
    configured: Callable[[str], RootConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    problem: str,
) -> None:
    config = configured("play")
    (tmp_path / "agent.py").write_text(f"{line}\n{AGENT}")
    if "within" in problem:
        monkeypatch.setattr(
            "agentrl.plugins.integrations.agent_worker.description._DESCRIBE_TIMEOUT_SECONDS", 3.0
        )
    with pytest.raises(ConfigError, match=problem) as caught:
        with_agent_elsewhere(config, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_an_interpreter_without_agentrl_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (tmp_path / "agent.py").write_text(AGENT)
    given = {"agent": f"{tmp_path / 'agent.py'}:play", "agent_python": tmp_path / "bare/bin/python"}
    with pytest.raises(ConfigError, match="has no AgentRL; install it there with"):
        with_agent_elsewhere(build_config(given), tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"agent_python": sys.executable}, "--agent_python requires --agent"),
        (
            {"agent": "a.py:play", "agent_python": "/absent"},
            "--agent_python /absent: program not found",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_config(given)

"""Whatever an environment's package does to its host, every request is answered."""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import DataSection
from agentrl.errors import AgentError, ConfigError
from agentrl.inference.dialects.api_server import APIServer
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.schema import AgentResult
from agentrl.schema.agent_endpoint import AgentEndpoint

PACKAGE = '''
"""A package of games in which all goes wrong, each in its own way."""

import os
import subprocess
import sys
import types

REWARDS = [1, float("nan"), "high", None, [1], object(), {1: {2}}]


def reset(seed):
    if seed == "flood":
        print(("x" * 100 + "\\n") * 100_000)
        os.write(1, b"\\n{}\\n" * 1000)
    if seed == "child":
        child = subprocess.Popen(["sleep", "1000"])
        print(f"child {child.pid}", file=open("child", "w"))
    if seed == "exit":
        sys.exit("this game ends programs")
    if seed == "raise":
        raise ValueError("no such maze")


class Game:
    def __init__(self, way="", reward=0):
        if way == "leave":
            sys.exit("no game without a licence")
        self.way, self.given = way, REWARDS[reward]

    def reset(self, num_players, seed):
        if seed:
            reset(self.way)

    def get_observation(self):
        return 0, [(-1, "go", None)]

    def step(self, action):
        return True, {}

    def close(self):
        return [self.given], [{"turn_count": 1, "invalid_move": False}]


def make(env_id, **args):
    return Game(**args)


maze = types.SimpleNamespace(entry_point="textarena:Game", kwargs={})
envs = types.SimpleNamespace(registration=types.SimpleNamespace(ENV_REGISTRY={"Maze-v0": maze}))
'''


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSection:
    """Return settings of an interpreter that finds the package above."""
    (tmp_path / "textarena.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return DataSection(env_python=Path(sys.executable))


@asynccontextmanager
async def policy() -> AsyncIterator[AgentEndpoint]:
    async def reply(messages: list[Any], tools: list[Any]) -> EngineReply:
        return EngineReply("left")

    async with (
        APIServer.open("127.0.0.1") as server,
        server.serve(EngineSession("policy", reply)) as endpoint,
    ):
        yield endpoint


def environment(section: DataSection, **args: Any) -> EnvironmentProcess:
    return EnvironmentProcess(EnvironmentUri("textarena", "Maze-v0", {"size": 2, **args}), section)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (0, ""),
        (1, "reward is nan"),
        (2, "reward is a str"),
        (3, ""),  # none: the task's scorer decides
        (4, "reward is a list"),
        (5, "textarena:Maze-v0 failed: its reply is not JSON-serializable"),
        (6, "textarena:Maze-v0 failed: its reply is not JSON-serializable"),
    ],
)
async def test_a_reward_is_a_number_or_the_attempt_has_failed(
    section: DataSection, reward: int, problem: str
) -> None:
    said = ""
    with environment(section, reward=reward) as games:
        async with policy() as endpoint:
            try:
                AgentResult.of(await games.play(0, endpoint))
            except (AgentError, ValueError) as error:
                said = str(error)
    assert problem in said
    assert bool(problem) == bool(said)


@pytest.mark.parametrize(
    ("way", "problem"),
    [("exit", "SystemExit: this game ends programs"), ("raise", "ValueError: no such maze")],
)
async def test_a_game_that_cannot_begin_fails_its_attempt_alone(
    section: DataSection, way: str, problem: str
) -> None:
    with environment(section, way=way) as games:
        async with policy() as endpoint:
            with pytest.raises(AgentError, match=f"textarena:Maze-v0 failed: {problem}"):
                await games.play(1, endpoint)
            assert (await games.play(0, endpoint)).answer == "left"
        with pytest.raises(ConfigError, match=f"--env textarena:Maze-v0: {problem}"):
            games.rows([0, 1])


def test_an_environment_that_ends_its_program_where_it_loads_says_why(section: DataSection) -> None:
    problem = "--env textarena:Maze-v0: SystemExit: no game without a licence"
    with environment(section, way="leave") as games, pytest.raises(ConfigError, match=problem):
        games.size()


async def test_what_a_game_prints_is_no_answer_and_is_not_kept_without_bound(
    section: DataSection, capfd: pytest.CaptureFixture[str]
) -> None:
    with environment(section, way="flood") as games:
        async with policy() as endpoint:
            assert (await games.play(1, endpoint)).answer == "left"
    printed, said = map(len, capfd.readouterr())
    assert printed == 0
    assert 0 < said < 9_000_000


async def test_what_a_game_started_ends_with_the_process(
    section: DataSection, tmp_path: Path
) -> None:
    with environment(section, way="child") as games:
        async with policy() as endpoint:
            await games.play(1, endpoint)
    child = int((tmp_path / "child").read_text().split()[1])
    until = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < until, "it still runs"


def _runs(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    except FileNotFoundError:
        return False

"""An environment that lies, floods or breaks off ends in one line, and no other rollout with it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import DataSection
from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.environments.environment_source import TEXTARENA
from agentrl.schema import AgentResult
from agentrl.schema.agent_endpoint import AgentEndpoint

URI = EnvironmentUri("textarena", "Maze-v0")
ENDPOINT = AgentEndpoint(base_url="http://127.0.0.1:1/v1", api_key="k", model="m")


def lying(folder: Path, **answers: Any) -> DataSection:
    """Return settings whose interpreter answers as it is told, whatever it should run."""
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable} -S\n"
        "import json, sys\n"
        "nan, inf = float('nan'), float('inf')\n"
        f"answers = {answers!r}\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    kind = next(name for name in ('describe', 'rows', 'play') if name in asked)\n"
        "    print(json.dumps({'id': asked['id'], **answers.get(kind, {})}), flush=True)\n"
    )
    python.chmod(0o755)
    return DataSection(env_python=python)


@pytest.mark.parametrize("size", [-1, 0, 10**12, "many", 2.5, None, [1], True])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: object) -> None:
    section = lying(tmp_path, describe={"size": size})
    with (
        EnvironmentProcess(URI, section) as environment,
        pytest.raises(ConfigError, match=r"--env textarena:Maze-v0: it has .* tasks"),
    ):
        environment.size()


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (None, "2 tasks were requested"),
        ([{"query": "a"}], "2 tasks were requested"),
        ([7, 8], "row 0: expected a JSON object"),
        ([{}, {}], "row 0: no question"),
        ([{"query": "a", "answer": {"x": [1] * 3}, "images": ["/dev/zero"]}] * 2, "row 0: image"),
        ([{"query": "x" * 4_000_000}] * 2, "row 0: 4,0.* characters of text"),
    ],
)
def test_tasks_that_are_none_are_refused_by_their_number(
    tmp_path: Path, rows: object, why: str
) -> None:
    section = lying(tmp_path, describe={"size": 2}, rows={"rows": rows})
    with pytest.raises(ConfigError, match=f"--env textarena:Maze-v0: {why}") as refused:
        list(TEXTARENA.tasks(URI.env_id, section, "train", seed=0))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("play", "why"),
    [
        ({}, "it returned no rollout"),
        ({"result": None}, "it returned no rollout"),
        ({"result": {}}, "answer"),
        ({"result": {"answer": "7", "secret": 1}}, "secret"),
        ({"error": "gone\x1b[2J\n" + "x" * 9999}, r"gone\\x1b"),
        ({"error": ["x"]}, r"\['x'\]"),
    ],
)
async def test_a_rollout_that_ends_in_nothing_is_a_failure_of_the_environment(
    tmp_path: Path, play: dict[str, Any], why: str
) -> None:
    with EnvironmentProcess(URI, lying(tmp_path, play=play)) as environment:
        with pytest.raises(AgentError, match=why) as failed:
            await environment.play(0, ENDPOINT)
        assert environment.is_alive
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 1000


async def test_an_environment_that_cannot_be_set_up_is_ended_and_begun_anew(tmp_path: Path) -> None:
    with EnvironmentProcess(URI, lying(tmp_path, describe={"mistake": "no disk"})) as environment:
        with pytest.raises(AgentError, match="textarena:Maze-v0 failed: no disk"):
            await environment.ready()
        assert not environment.is_alive


async def test_rewards_that_are_no_numbers_are_refused_where_results_are_read(
    tmp_path: Path,
) -> None:
    section = lying(tmp_path, play={"result": {"answer": "7", "step_rewards": [0.5] * 20_000}})
    with EnvironmentProcess(URI, section) as environment:
        result = await environment.play(0, ENDPOINT)
    with pytest.raises(ValueError, match="more than 10,000 step_rewards"):
        AgentResult.of(result)

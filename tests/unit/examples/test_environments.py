"""One runnable file for each kind of environment and agent, short enough to be read at once."""

import runpy
from pathlib import Path

import pytest

from agentrl.plugins.environments import EnvironmentUri
from agentrl.plugins.environments.environment_uri import ENVIRONMENTS

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDER = EXAMPLES / "environments"


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_each_kind_has_an_example_of_forty_lines_at_most(kind: str) -> None:
    path = FOLDER / f"train_{kind}.py"
    assert path.read_text().count("\n") <= 40
    uri = EnvironmentUri.parse(runpy.run_path(str(path))["ENV"])
    assert uri.kind == kind


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "agents").glob("*.py")), ids=lambda path: path.stem
)
def test_each_agent_has_an_example_of_forty_lines_at_most(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 40
    assert "async def play(task: MCPTask, endpoint: AgentEndpoint) -> str:" in text or (
        '"agent_command"' in text
    )

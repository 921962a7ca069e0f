"""One runnable file for each kind of environment, short enough to be read at once."""

import runpy
from pathlib import Path

import pytest

from agentrl.environments import EnvironmentUri
from agentrl.environments.environment_uri import PACKAGES

FOLDER = Path(__file__).parents[3] / "examples/environments"


@pytest.mark.parametrize("kind", PACKAGES)
def test_each_kind_has_an_example_of_forty_lines_at_most(kind: str) -> None:
    path = FOLDER / f"train_{kind}.py"
    assert path.read_text().count("\n") <= 40
    uri = EnvironmentUri.parse(runpy.run_path(str(path))["ENV"])
    assert uri.kind == kind

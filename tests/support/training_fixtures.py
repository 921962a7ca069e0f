"""Fixtures of a small model and of runs that train it, for the conftest files that import them."""

from pathlib import Path
from typing import Any

import pytest
from support.training import MakeConfig, write_model

from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_config(tmp_path: Path, mongo_uri: str, model_path: Path) -> MakeConfig:
    """Configurations of a run that trains on what the database holds."""

    def make(**flags: Any) -> RootConfig:
        values: dict[str, Any] = {
            "run_name": mongo_uri.partition("?")[0].rpartition("/")[2],
            "output_dir": str(tmp_path / "output"),
            "db_connection_string": mongo_uri,
            "model_name_or_path": str(model_path),
            "enable_sampling": "false",
            "num_generations": "3",
            "groups_per_step": "2",
            "learning_rate": "0.001",
            "max_steps": "2",
            "save_steps": "1",
            "trainer_threads": "1",
            "torch_dtype": "float32",
            "max_staleness": "100",
            # Runs are compared bit by bit, and what is faster may change from one to the other.
            "merge": "tree",
        }
        given = values | flags  # None takes a default back
        return build_config({name: str(v) for name, v in given.items() if v is not None})

    return make

"""A tiny model for the engine's own parts."""

from pathlib import Path

import pytest
import torch
from support.engines import Oracle, make_model
from transformers import PreTrainedModel

from agentrl.plugins.engine.generation.model_runner import load_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "first", seed=1)


@pytest.fixture(scope="session")
def second_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "second", seed=2)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return load_model(checkpoint, torch.float32)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()

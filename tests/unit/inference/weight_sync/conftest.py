"""Models whose weights travel between a trainer and its servers."""

from pathlib import Path

import pytest
from support.engines import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "first", seed=1), make_model(folder / "second", seed=2)

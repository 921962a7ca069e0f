from pathlib import Path

import pytest
from harness.tiny_tokenizer import write_tokenizer

from agentrl.renderers.renderer import Renderer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def renderer(tokenizer_dir: Path) -> Renderer:
    return Renderer.load(tokenizer_dir)

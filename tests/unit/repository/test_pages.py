"""What the pages for contributors name exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/decisions/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|scripts)/[\w/.-]*)`", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_objects_exist(page: Path) -> None:
    for name in re.findall(r"`(agentrl(?:\.\w+)+)`", page.read_text()):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_contributing_names_what_the_code_has() -> None:
    _, _, how_to_add = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")
    sources = "\n".join(path.read_text() for path in ROOT.glob("src/agentrl/**/*.py"))

    named = re.findall(r"`(?:\w+\.)*(\w+)`", how_to_add)

    assert len(named) > 10
    assert [name for name in named if not re.search(rf"\b{name}\b", sources)] == []

"""docs/flags.md says what the code says."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.config.flags import ADVANCED, FLAGS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flags_page", ROOT / "scripts/flags_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_code(script: ModuleType) -> None:
    assert "".join(script.written()) == script.PAGE.read_text()
    assert "".join(script.advanced()) == script.ADVANCED_PAGE.read_text()


def test_every_flag_has_one_row_of_four_cells(script: ModuleType) -> None:
    sections, _, _ = script.PAGE.read_text().partition("\n## Options of single commands")
    found = re.findall(r"^\| `--(\w+)` \| [^|]+ \| [^|]* \| [^|]+ \|$", sections, re.MULTILINE)

    assert found == list(FLAGS)
    rest = re.findall(r"^\| `(\w+)`", script.ADVANCED_PAGE.read_text(), re.MULTILINE)
    assert rest == sorted(ADVANCED)


def test_a_row_names_values_default_and_pages(script: ModuleType) -> None:
    page = script.PAGE.read_text()

    assert "| `--loss_calculator` | `GRPO`, `MINIRL`, " in page
    assert "| `--fresh` | `true`, `false` | `false` | Start over" in page
    assert "see [docs/store.md](store.md)" in page
    assert "| `agentrl inspect records` | `--limit` | `N` | Maximum number" in page
    assert "| `--lr` | `--learning_rate` |" in page

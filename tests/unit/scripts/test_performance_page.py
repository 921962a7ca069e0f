"""docs/performance.md says what benchmarks/results holds."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script() -> ModuleType:
    path = ROOT / "scripts/performance_page.py"
    spec = importlib.util.spec_from_file_location("performance_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_results(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = script.PAGE.read_text()
    assert script.filled(page) == page
    value = json.loads((ROOT / "benchmarks/results/store.json").read_text())["claims_ratio"]
    assert f"| {value:.2f} | ≥ 0.9 | `store.json`: `claims_ratio` |" in page
    (tmp_path / "store.json").write_text('{"claims_ratio": 0.123}')
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    table = script.filled(page).partition(script.END)[0]
    assert table.count("\n| ") == 2  # the heading, and the one figure that is left
    assert "| 0.12 |" in table

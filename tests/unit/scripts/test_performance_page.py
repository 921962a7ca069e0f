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


def test_the_pages_are_those_of_the_results(script: ModuleType) -> None:
    for name in script.PAGES:
        assert script.filled(name) == (ROOT / name).read_text()
    value = json.loads((ROOT / "benchmarks/results/store.json").read_text())["claims_ratio"]
    page = script.filled("docs/performance.md")
    assert f"| {value:.2f} | ≥ 0.9 | `store.json`: `claims_ratio` |" in page


def test_what_no_result_holds_is_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store.json").write_text('{"claims_ratio": 0.123}')
    line = {"id": "1", "group": "High", "tried": "{a.tried:,} tools", "before": "10 s", "goal": ""}
    lines = [{**line, "after": after, "tests": ["t"]} for after in ("{a.s:.1f} s", "{chaos.lost}")]
    found = {"lines": lines, "parts": {"a": {"tried": 2000, "s": 0.25}, "chaos": None}}
    (tmp_path / "hardening.json").write_text(json.dumps(found))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    table = script.filled("docs/performance.md").partition(script.END)[0]
    assert table.count("\n| ") == 2  # the heading, and the one figure that is left
    assert "| 0.12 |" in table
    table = script.filled("docs/hardening.md").partition(script.END)[0]
    assert table.count("\n| ") == 2
    assert "| 1 | 2,000 tools | 10 s | 0.2 s |  | `t` |" in table

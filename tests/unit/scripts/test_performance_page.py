"""README and the pages of docs say what benchmarks/results holds."""

import importlib.util
import re
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


def test_the_pages_say_what_the_results_hold(script: ModuleType) -> None:
    for name in script.PAGES:
        page = (ROOT / name).read_text()
        assert script.filled(page) == page
        # A mark without a number in front of which it could stand is a figure that nobody fills.
        assert len(re.findall(r"<!--", page)) == len(script._FIGURE.findall(page)) > 10


def test_a_figure_keeps_its_form(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store.json").write_text('{"ratio": 0.1256, "sizes": [{"num": 1}, {"num": 2000}]}')
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    page = "| <!--store.ratio-->9.99 of <!--store.sizes.-1.num-->7 | <!--store.ratio-->8.0% |"
    assert script.filled(page) == (
        "| <!--store.ratio-->0.13 of <!--store.sizes.-1.num-->2,000 | <!--store.ratio-->12.6% |"
    )
    with pytest.raises(KeyError):
        script.filled("<!--store.none-->1")

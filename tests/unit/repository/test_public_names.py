"""One list of public names: API pages, documentation and examples agree with it."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.doc_blocks import documented_blocks

ROOT = Path(__file__).parents[3]
LIST = (ROOT / "docs/api/public_names.txt").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^[\w.]+", LIST, re.MULTILINE))
WITH_THE_INSIDE = {
    *("examples/shop/episodes.py", "examples/shop/warm_start.py"),
    "examples/desktop/display.py",
}
"""They make the models that the package ships, or start programs as the package does."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "scripts/public_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> Iterator[tuple[str, str]]:
    """Yield the name and code of every Python block of the pages, example and cell of a notebook."""
    yield from documented_blocks("python")
    for path in sorted(ROOT.glob("examples/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in WITH_THE_INSIDE:
            yield name, path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("examples/**/*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                lines = [line for line in cell["source"] if not line.startswith(("%", "!"))]
                yield path.name, "".join(lines)


def imported(code: str) -> Iterator[str]:
    """Yield what code imports from AgentRL, by full path."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agentrl":
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == "agentrl")


def test_the_list_is_that_of_the_code(script: ModuleType) -> None:
    now = sorted(script.lines(script.public_names()))

    assert now == LIST.splitlines(), "run scripts/public_names.py"


def test_pages_and_examples_import_public_names_only() -> None:
    found = {(name, path) for name, code in sources() for path in imported(code)}

    assert len(found) > 40
    assert sorted((name, path) for name, path in found if path not in LISTED) == []


def test_interfaces_of_plugins_are_public() -> None:
    rows = re.findall(r"^\|.*", (ROOT / "docs/plugins.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"`(agentrl(?:\.\w+)+)`", "\n".join(rows)))

    assert len(named) > 5
    assert sorted(named - LISTED) == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/api/index.md").read_text()
    pages = {path.name for path in ROOT.glob("docs/api/*.md")} - {"index.md"}

    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == pages


def test_a_changed_signature_changes_its_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, pages = tmp_path / "src/agentrl", tmp_path / "docs/api"
    package.mkdir(parents=True)
    pages.mkdir(parents=True)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "LIST", pages / "public_names.txt")
    (pages / "all.md").write_text(
        "::: agentrl.Box\n    options:\n      members: [close, open]\n\n::: agentrl.total\n"
    )
    (package / "inside.py").write_text(
        "class Base:\n    def close(self) -> None: ...\n\n"
        "class Box(Base):\n    '''A box.'''\n\n    size: int = 3\n    _hidden = 1\n"
        "    async def open(self, *, key: str) -> 'Box': ...\n"
    )
    (package / "__init__.py").write_text(
        "from agentrl.inside import Box\n\n__all__ = ['Box', 'total']\n"
        "def total(values: list[int], start: int = 0) -> int: ...\n"
    )

    assert sorted(script.lines(script.public_names())) == [
        "agentrl.Box.close() -> None",
        "agentrl.Box.open(*, key: str) -> Box [async]",
        "agentrl.Box: class(Base)",
        "agentrl.total(values: list[int], start: int = 0) -> int",
    ]

"""What the pages for contributors name exists."""

import inspect
import itertools
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *ROOT.glob("docs/decisions/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|scripts)/[\w/.-]*)`", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_objects_exist(page: Path) -> None:
    for name in re.findall(r"`(agentrl(?:\.\w+)+)`", page.read_text()):
        assert pkgutil.resolve_name(name), name


def test_contributing_names_what_the_code_has() -> None:
    _, _, how_to_add = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")
    sources = "\n".join(path.read_text() for path in ROOT.glob("src/agentrl/**/*.py"))

    named = re.findall(r"`(?:\w+\.)*(\w+)`", how_to_add)

    assert len(named) > 10
    assert [name for name in named if not re.search(rf"\b{name}\b", sources)] == []


def _source(name: str) -> str:
    found = pkgutil.resolve_name(name)
    # A command of click keeps its function.
    return inspect.getsource(getattr(found, "callback", found))


def test_the_way_to_the_gradient_is_one_of_calls() -> None:
    """The architecture lists it; each function names the next one in its source."""
    _, _, section = (
        (ROOT / "docs/architecture.md").read_text().partition("The calls from the command")
    )
    stations = re.findall(r"`(agentrl(?:\.\w+)+)`", section.partition("\n## ")[0])
    assert len(stations) > 8
    for here, following in itertools.pairwise(stations):
        # The loop calls the reader, the packing and the group one after the other.
        callers = [here, "agentrl.trainer.rl.training_loop", "agentrl.trainer.learner.passes"]
        sources = [_source(name) for name in callers]
        name = following.rpartition(".")[2]
        assert any(re.search(rf"\b{name}\b", source) for source in sources), (here, following)


def test_the_readme_is_short_and_its_evidence_and_pictures_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(
        r"""(?:\]\(|src="|srcset=")((?:assets|benchmarks|docs/images|tests)/[^)"]+)""", readme
    )

    assert len(readme.splitlines()) <= 180
    assert len(shown) > 15
    assert [name for name in shown if not (ROOT / name).exists()] == []


def test_the_picture_of_the_processes_is_one_in_two_themes() -> None:
    light, dark = (
        (ROOT / f"docs/images/processes-{theme}.svg").read_text().partition("</style>")
        for theme in ("light", "dark")
    )

    assert light[2] == dark[2]
    assert light[0] != dark[0]


def test_the_page_lists_every_built_in_scorer() -> None:
    decorator = re.compile(r'^@MCPScorerFactory\.register_scorer\(\s*"(\w+)"', re.MULTILINE)
    sources = [path.read_text() for path in ROOT.glob("src/agentrl/rewards/*.py")]
    _, _, section = (ROOT / "docs/bring-your-own.md").read_text().partition("| scorer | what")

    listed = re.findall(r"^\| (`.*?`) \|", section.partition("\n\n")[0], re.MULTILINE)

    names = {name for source in sources for name in decorator.findall(source)}
    assert {name for cell in listed for name in re.findall(r"`(\w+)`", cell)} == names

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[3] / "scripts/house_figures"

SOURCES = {
    "__init__": "",
    "cli/__init__": "",
    "cli/main": "def main():\n    return 0\n",
    "cli/train": """
from agentrl.trainer import train


def main(argv):
    return train(argv)
""",
    "trainer/__init__": "from agentrl.trainer.process import train\n",
    "trainer/process": """
from agentrl.data.batch import make_batch
from agentrl.trainer.team import Team


class Loop:
    def __init__(self, team: Team):
        self._team = team

    def step(self):
        self._team.train(make_batch([1]))


def train(argv):
    Loop(Team()).step()
""",
    "trainer/team": """
from agentrl.data.batch import Batch
from agentrl.models.policy import loss


class Team:
    def train(self, batch: Batch):
        loss(batch).backward()
""",
    "data/__init__": "",
    "data/batch": """
from agentrl.data.packing import pack


class Batch:
    pass


def make_batch(rows):
    pack(rows)
    return Batch()
""",
    "data/packing": "def pack(rows):\n    return rows\n",
    "models/__init__": "",
    "models/policy": "class Batch:\n    pass\n\n\ndef loss(batch):\n    return batch\n",
    "models/packing": "UNUSED = 1\n",
}


def run(root: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def figures(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(root, "--json", "--list"))
    return found


def write(root: Path, sources: dict[str, str]) -> None:
    for name, text in sources.items():
        path = root / "src/agentrl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_counts_lines_modules_and_rooms(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    found = figures(tmp_path)

    assert found["lines"] == sum(len(text.splitlines()) for text in SOURCES.values())
    assert found["modules"] == len(SOURCES)
    assert found["names"]["rooms"] == ["cli", "data", "models", "trainer"]
    assert f"{'lines':34} {found['lines']:>8}" in run(tmp_path)


def test_names_what_is_used_twice_and_small_modules_with_one_importer(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    names = figures(tmp_path)["names"]

    assert names["file_names_used_twice"] == ["packing"]
    assert names["type_names_used_twice"] == ["Batch"]
    assert [line.split()[0] for line in names["small_modules_with_one_importer"]] == [
        "agentrl.data.packing",
        "agentrl.models.policy",
        # Imported by name from the package: its one user is the command.
        "agentrl.trainer.process",
        "agentrl.trainer.team",
    ]


def test_a_large_module_is_not_small(tmp_path: Path) -> None:
    padded = SOURCES["models/policy"] + "\n" * 80
    write(tmp_path, {**SOURCES, "models/policy": padded})

    listed = " ".join(figures(tmp_path)["names"]["small_modules_with_one_importer"])

    assert "agentrl.models.policy" not in listed


def test_follows_calls_from_the_command_through_the_batch_to_the_gradient(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    chain = figures(tmp_path)["names"]["files_from_train_to_gradient"]

    assert [line.split()[0] for line in chain] == [
        "agentrl.cli.main",
        "agentrl.cli.train",
        "agentrl.trainer.process",
        "agentrl.data.batch",
        "agentrl.data.packing",
        "agentrl.trainer.team",
        "agentrl.models.policy",
    ]


def test_this_checkout_has_a_chain_to_the_gradient() -> None:
    root = Path(__file__).parents[3]

    found = figures(root)

    chain = found["names"]["files_from_train_to_gradient"]
    assert chain[0].startswith("agentrl.cli.main ")
    assert found["files_from_train_to_gradient"] == len(chain) >= 5


def test_benchmarks_import_nothing_of_the_tests() -> None:
    """What both need lies in `benchmarks/harness`."""
    root = SCRIPT.parents[1]
    tests = {path.stem for path in (root / "tests").iterdir()}
    paths = [*(root / "benchmarks").rglob("*.py"), *(root / "scripts").glob("*.py")]
    imports = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    assert len(paths) > 40
    for path in paths:
        assert not tests & set(imports.findall(path.read_text())), path


def test_no_file_name_and_no_type_name_of_the_package_stands_for_two_things() -> None:
    names = figures(SCRIPT.parents[1])["names"]
    assert (names["file_names_used_twice"], names["type_names_used_twice"]) == ([], [])

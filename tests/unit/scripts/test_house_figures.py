import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/house_figures"

SOURCES = {
    "__init__": "",
    "cli/__init__": "",
    "cli/main": "def main():\n    return 0\n",
    "cli/commands": """
from agentrl.config.loading import write_config


def run(config):
    write_config(config)


def train(config):
    from agentrl.trainer import train

    return train(config)
""",
    "config/__init__": "",
    "config/command_line": """
from agentrl.config.loading import load_config


class FlagCommand:
    def invoke(self):
        return load_config({})
""",
    "config/loading": """
from agentrl.config.validation.checks import check


def load_config(values):
    check(values)


def write_config(config):
    return config
""",
    "config/validation/__init__": "",
    "config/validation/checks": """
from agentrl.config.bounds import in_bounds


def check(values):
    in_bounds(values)
""",
    "config/bounds": "def in_bounds(values):\n    return values\n",
    "trainer/__init__": "from agentrl.trainer.process import train\n",
    "trainer/process": """
from agentrl.data.batch import make_batch
from agentrl.data.groups import GroupReader
from agentrl.trainer.self_test import test_gradient
from agentrl.trainer.team import Member, Team
from agentrl.trainer.ranks import on_ranks


class Loop:
    def __init__(self, team: Team):
        self.team = team
        self.reader = GroupReader()


def train_steps(loop: Loop):
    groups = loop.reader.read(max_staleness=1)
    loop.team.train(make_batch(groups))


def train(config):
    test_gradient()
    on_ranks(lambda: train_steps(Loop(Team())))
""",
    "trainer/ranks": "def on_ranks(work):\n    return work()\n",
    "trainer/self_test": """
from agentrl.data.batch import Batch
from agentrl.trainer.passes import accumulate


def test_gradient():
    accumulate(Batch())
""",
    "trainer/team": """
from agentrl.trainer.passes import Passes, WholePasses


class Member:
    def __init__(self):
        self._passes: Passes = WholePasses()

    def train(self, batch):
        self._passes.forward_backward(batch)


class Team:
    def train(self, batch):
        self._on_all(Member.train, batch)

    def _on_all(self, operation, batch):
        operation(Member(), batch)
""",
    "trainer/passes": """
from typing import Protocol

from agentrl.data.batch import Batch
from agentrl.models.policy import loss


class Passes(Protocol):
    def forward_backward(self, batch): ...


class WholePasses:
    def forward_backward(self, batch):
        accumulate(batch)


def accumulate(batch: Batch):
    loss(batch).backward()
""",
    "data/__init__": "",
    "data/batch": """
from collections.abc import Sequence

from agentrl.data.groups import Group
from agentrl.data.packing import pack


class Batch:
    pass


def make_batch(groups: Sequence[Group]):
    pack(groups)
    return Batch()
""",
    "data/groups": """
class Group:
    pass


class GroupReader:
    def read(self, max_staleness):
        return [Group()]
""",
    "data/packing": "def pack(rows):\n    return rows\n",
    "models/__init__": "",
    "models/policy": "class Batch:\n    pass\n\n\ndef loss(batch):\n    return batch\n",
    "models/packing": "UNUSED = 1\n",
    "rollout/__init__": "",
    "rollout/server": """
from agentrl.rollout.sampling import AsyncSampler, LoggedSession, Session


class APIServer:
    def _handler_of(self, session: Session):
        _ChatCall(session).run()


class _ChatCall:
    def __init__(self, session: Session):
        self._session = session

    def run(self):
        self._session.chat()
""",
    "rollout/sampling": """
from abc import ABC

from agentrl.rollout.client import SGLangClient, TurnRepository, prompt


class AsyncSampler:
    def __init__(self, client: SGLangClient, turns: TurnRepository):
        client, self._turns = client, turns
        self._clients: dict[str, SGLangClient] = {"": client}

    def sample(self):
        self._clients[""].generate(prompt())
        self._turns.append()


class Session(ABC):
    def chat(self): ...


class LoggedSession(Session):
    def __init__(self, sampler: AsyncSampler):
        self._sampler = sampler

    def chat(self):
        self._sampler.sample()
""",
    "rollout/silent": """
from agentrl.rollout.sampling import Session


class SilentSession(Session):
    def chat(self): ...
""",
    "rollout/client": """
from agentrl.rollout.prompts import prompt


class SGLangClient:
    def generate(self, ids): ...


class TurnRepository:
    def append(self): ...
""",
    "rollout/prompts": "def prompt():\n    return [1]\n",
}


def run(root: Path, *flags: str) -> str:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def figures(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(root, "--json", "--list"))
    return found


@cache
def of_this_checkout() -> dict[str, Any]:
    return figures(SCRIPT.parents[1])


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
    assert found["names"]["rooms"] == ["cli", "config", "data", "models", "rollout", "trainer"]
    assert f"{'lines':34} {found['lines']:>8}" in run(tmp_path)


def test_names_what_is_used_twice_and_small_modules_with_one_importer(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    names = figures(tmp_path)["names"]

    assert names["file_names_used_twice"] == ["packing"]
    assert names["type_names_used_twice"] == ["Batch"]
    users = {line.split()[0]: line.split()[-1] for line in names["small_modules_with_one_importer"]}
    assert users["agentrl.data.packing"] == "agentrl.data.batch"
    # Imported by name from the package: its one user is the command.
    assert users["agentrl.trainer.process"] == "agentrl.cli.commands"
    # A constant, a class or a function: what passes it on is not its user, and two users are not one.
    assert not {"agentrl.models.packing", "agentrl.data.batch", "agentrl.trainer"} & users.keys()


def test_a_large_module_is_not_small(tmp_path: Path) -> None:
    padded = SOURCES["models/policy"] + "\n" * 80
    write(tmp_path, {**SOURCES, "models/policy": padded})

    listed = " ".join(figures(tmp_path)["names"]["small_modules_with_one_importer"])

    assert "agentrl.models.policy" not in listed


def modules_of(lines: list[str]) -> list[str]:
    return [line.split()[0].removeprefix("agentrl.") for line in lines]


def test_the_road_to_the_gradient_leads_through_the_step(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    found = figures(tmp_path)

    # Neither `self_test`, which is nearer to the gradient, nor `Protocol`s and values that are
    # passed hide the road.
    assert modules_of(found["names"]["files_from_train_to_gradient"]) == [
        "cli.main",
        "cli.commands",
        "trainer.process",
        "trainer.ranks",
        "data.groups",
        "data.batch",
        "data.packing",
        "trainer.team",
        "trainer.passes",
        "models.policy",
    ]
    assert found["longest_on_the_road"] == len(SOURCES["trainer/process"].splitlines())
    assert found["names"]["longest_on_the_road"] == ["agentrl.trainer.process"]


@pytest.mark.parametrize(
    ("name", "broken", "problem"),
    [
        (
            "trainer/process",
            ("def train_steps", "def train_stride"),
            "0 modules define train_steps",
        ),
        (
            "trainer/process",
            ("train_steps(Loop(Team()))", "Loop(Team())"),
            "train does not lead to train_steps",
        ),
        ("trainer/team", ("(Member.train, ", "("), "train_steps does not lead to accumulate"),
    ],
)
def test_a_road_that_misses_a_station_is_an_error(
    tmp_path: Path, name: str, broken: tuple[str, str], problem: str
) -> None:
    text = SOURCES[name].replace(*broken)
    assert text != SOURCES[name]
    write(tmp_path, {**SOURCES, name: text})

    command = [sys.executable, str(SCRIPT), "--root", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (result.returncode, problem in result.stderr) == (1, True), result.stderr


def test_the_roads_of_a_request_and_of_a_flag(tmp_path: Path) -> None:
    write(tmp_path, SOURCES)

    names = figures(tmp_path)["names"]

    # Only the session that leads to a sample, and what checks of values call is on no value's way.
    request = modules_of(names["modules_an_agent_request_passes"])
    assert request == ["rollout.server", "rollout.sampling", "rollout.client", "rollout.prompts"]
    assert modules_of(names["modules_a_flag_passes"]) == [
        "cli.main",
        "config.command_line",
        "config.loading",
        "cli.commands",
        "data.groups",
        "trainer.process",
    ]


def test_divides_kernel_and_plugins_and_counts_the_imports_between_them(tmp_path: Path) -> None:
    plugin = "from agentrl.data.packing import pack\nfrom agentrl.plugins.sft import shown\n"
    sources = {
        **SOURCES,
        "plugins/__init__": "",
        "plugins/engine": plugin,
        "integrations/__init__": "from agentrl.plugins.engine import pack\n",
        "models/__init__": """
from typing import TYPE_CHECKING

from agentrl import plugins_of_others

if TYPE_CHECKING:
    from agentrl.plugins.engine import pack


def lazy():
    from agentrl import integrations
    import agentrl.plugins.engine as engine, agentrl.data
""",
    }
    write(tmp_path, SOURCES)
    before = figures(tmp_path)
    write(tmp_path, sources)

    found = figures(tmp_path)

    assert (before["kernel_lines"], before["plugin_lines"]) == (before["lines"], 0)
    assert (found["plugin_lines"], found["kernel_imports_of_plugins"]) == (3, 3)
    assert found["kernel_lines"] == found["lines"] - 3
    assert [line.split()[0] for line in found["names"]["kernel_imports_of_plugins"]] == [
        "agentrl.models:7:",
        "agentrl.models:11:",
        "agentrl.models:12:",
    ]
    # With a module of its own, the former face is kernel again.
    write(tmp_path, {"integrations/bridge": ""})
    lines = figures(tmp_path)["names"]["kernel_imports_of_plugins"]
    assert [line.split()[0] for line in lines] == [
        "agentrl.integrations:1:",
        "agentrl.models:7:",
        "agentrl.models:12:",
    ]


def test_this_checkout_has_every_road() -> None:
    found = of_this_checkout()

    road = found["names"]["files_from_train_to_gradient"]
    assert road[0].startswith("agentrl.cli.main ")
    assert found["files_from_train_to_gradient"] == len(road) >= 10
    functions = " ".join(road)
    for name in ("train_steps", "Learner.forward_backward", "loss_of", "GroupReader.read_step"):
        assert name in functions
    request = " ".join(found["names"]["modules_an_agent_request_passes"])
    assert "Renderer.parse" in request
    assert "Coalescer.submit" in request
    assert {"agentrl.config.loading", "agentrl.data.select"} <= set(
        found["names"]["modules_a_flag_passes"]
    )
    assert found["kernel_lines"] + found["plugin_lines"] == found["lines"]


def test_the_road_to_the_gradient_is_the_one_that_the_documentation_shows() -> None:
    page = (SCRIPT.parents[1] / "docs/architecture.md").read_text()
    _, _, section = page.partition("## The road to the gradient\n")
    shown = re.findall(r"^\| `([\w.]+)` \|", section.partition("\n## ")[0], re.MULTILINE)

    found = of_this_checkout()
    road = [line.split()[0] for line in found["names"]["files_from_train_to_gradient"]]

    assert road == [f"agentrl.{name}" for name in shown]
    assert len(road) <= 14
    assert found["longest_on_the_road"] <= 500


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
    names = of_this_checkout()["names"]
    assert (names["file_names_used_twice"], names["type_names_used_twice"]) == ([], [])

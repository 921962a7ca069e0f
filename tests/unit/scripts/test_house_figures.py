import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[3] / "scripts/house_figures"


@cache
def of_this_checkout() -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--json", "--list"]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True, timeout=60))
    return found


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

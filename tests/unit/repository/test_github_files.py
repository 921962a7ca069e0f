"""The templates, the update bot and the development container agree with the repository."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MANIFESTS = {
    "pip": "pyproject.toml",
    "npm": "package.json",
    "github-actions": ".github/workflows/ci.yml",
}


def github(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("form", "required"),
    [("bug", {"version", "command", "outcome", "doctor"}), ("feature", {"goal", "today"})],
)
def test_forms_require_what_an_answer_needs(form: str, required: set[str]) -> None:
    fields = github(f"ISSUE_TEMPLATE/{form}.yml")["body"]

    asked = {field["id"] for field in fields if field.get("validations", {}).get("required")}
    texts = " ".join(field["attributes"].get("description", "") for field in fields)

    assert asked == required
    assert "`agentrl --version`" in texts


def test_updates_are_sought_where_versions_are_declared() -> None:
    folders = {
        entry["package-ecosystem"]: entry["directory"].strip("/")
        for entry in github("dependabot.yml")["updates"]
    }

    assert folders.keys() == MANIFESTS.keys()
    assert [
        kind for kind, folder in folders.items() if not (ROOT / folder / MANIFESTS[kind]).exists()
    ] == []


def test_the_container_has_the_oldest_python_and_runs_the_scripts() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    commands = container["postCreateCommand"].values()

    assert oldest is not None
    assert f"python:{oldest[1]}-" in container["image"]
    named = re.findall(r"scripts/\w+", " ".join(commands))
    assert named == ["scripts/setup", "scripts/install_desktop"]
    assert all((ROOT / name).exists() for name in named)


def test_named_files_of_the_templates_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.*")]

    named = re.findall(r"\b((?:scripts|docs)/[\w/.-]*\w|[A-Z]+\.md)\b", "\n".join(texts))

    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []

"""The pages for those in trouble and for those from elsewhere say what the code says."""

import ast
import re
from pathlib import Path

import pytest

from agentrl.cli.main import agentrl, commands
from agentrl.config.flags import FLAGS, NO_EFFECT, ONE_VALUE, ORIGINAL, canonical_name

ROOT = Path(__file__).parents[3]
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()
NAMES = (ROOT / "docs/coming-from.md").read_text()
NOT_FLAGS_ELSEWHERE = {
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "ckpt.interval",
    "ckpt.resume-step",
    "dataset_test_split",
    "max_off_policy_steps",
    "orchestrator.algorithms",
    "orchestrator.eval",
    "orchestrator.eval.interval",
    "trainer.loss",
    "trainer.resume_mode",
}
"""Names of the others that nobody would type as a flag here."""


def texts_of(path: Path) -> str:
    """Return all pieces of text in a module; those of adjoining literals are one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def rows(page: str) -> list[list[str]]:
    """Return the cells of all table rows, heads and rules left out."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_symptom_is_what_a_message_says() -> None:
    said = "\n".join(texts_of(path) for path in (ROOT / "src/agentrl").rglob("*.py"))
    symptoms = [words for cells in rows(TROUBLE) for words in code(cells[0])]
    assert len(symptoms) > 35
    shown = re.compile(r"\d+")  # figures of an example stand for what is filled in
    missing = [
        words
        for words in symptoms
        if not all(part.strip() in said for part in shown.split(words.replace("\\x1b[31m", "")))
    ]
    assert missing == []


def test_every_flag_of_the_pages_exists() -> None:
    for page in (TROUBLE, NAMES):
        named = re.findall(r"--(\w+)", " ".join(code(page)))
        own = {
            "config",
            "follow",
            "limit",
            "scorer",
            "score",
            "tool",
            "outcome",
            "show_password",
            "port",
        }
        assert {canonical_name(name) for name in named} - {*FLAGS, *ORIGINAL} - own == set()


def test_every_name_from_elsewhere_is_accepted_or_explained() -> None:
    by_setting, _, rest = NAMES.partition("## Names that are no flags here")
    listed = [name for cells in rows(rest.partition("## Words")[0]) for name in code(cells[0])]
    assert {canonical_name(name) for name in listed} & {*FLAGS, *NO_EFFECT} == set()
    explained = re.compile("|".join(f"{name.replace('*', '.*')}$" for name in listed))
    head, *table = rows(by_setting)
    assert head[1:4] == ["TRL", "verl", "prime-rl"]
    assert len(table) > 25
    unknown = []
    for _, *others, here in table:
        assert code(here), here
        for name in (name for cell in others for name in code(cell)):
            last = name.rpartition(".")[2]
            flag = canonical_name(last)
            if flag in {*FLAGS, *ORIGINAL}:
                assert f"--{flag}" in code(here), name
            elif not explained.match(last) and last not in {*NO_EFFECT, *ONE_VALUE}:
                unknown.append(name)
    assert set(unknown) == NOT_FLAGS_ELSEWHERE


_COMMAND = re.compile(r"\bagentrl (\w+)(?: (\w+))?")


@pytest.mark.parametrize("folder", ["src/agentrl", "docs", "README.md"])
def test_every_command_that_a_text_names_exists(folder: str) -> None:
    root = ROOT / folder
    paths = [root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md")]
    wrong = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        named = text if path.suffix == ".py" else " ".join(re.findall(r"`[^`]+`", text))
        for command, action in _COMMAND.findall(named):
            if command not in commands():
                continue  # prose
            group = agentrl.get_command(
                agentrl.make_context("agentrl", ["run", "-h"], resilient_parsing=True), command
            )
            actions = getattr(group, "commands", None)
            if actions is not None and action and action not in actions and action.islower():
                wrong.append(f"{path.name}: agentrl {command} {action}")
    assert wrong == []

"""Advantages, filters, rates and callbacks of the user are tried before a run starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms.advantages import group_advantages
from agentrl.algorithms.filters import GroupFacts, RecordFacts, filter_group
from agentrl.algorithms.function_trial import try_functions
from agentrl.config.sections import AlgorithmSection, TrainerSection
from agentrl.errors import ConfigError

TREE_HEADER = (
    "import numpy as np\nfrom agentrl.algorithms.tree_credit import TurnTree\n\n\n"
    "def own(tree: TurnTree):\n    "
)
FLAGS = ("advantage_estimator", "group_filter", "lr_scheduler_type", "on_step")
WRONG = {
    "a list": ("advantage_estimator", "return list(given.rewards)", "not list"),
    "a scalar": ("advantage_estimator", "return given.rewards.mean()", "not float64"),
    "float32": ("advantage_estimator", "return given.rewards.astype('f4')", "not float32"),
    "0 / 0": (
        "advantage_estimator",
        "return (given.rewards - given.rewards.mean()) / given.rewards.std()",
        "return 0 where a deviation is 0",
    ),
    "rewards in place": (
        "advantage_estimator",
        "given.rewards[:] -= given.rewards.mean(); return given.rewards",
        "changes rewards in place",
    ),
    "an order": ("advantage_estimator", "return np.cumsum(given.rewards)", "order"),
    "noise": ("advantage_estimator", "return np.random.rand(len(given.rewards))", "two calls"),
    "an exception": ("advantage_estimator", "return given.scores", "AttributeError"),
    "one bool": ("group_filter", "return True", "one bool for each of the 4 records"),
    "scores as bools": ("group_filter", "return [r.score for r in given.records]", "one bool"),
    "a draw": (
        "group_filter",
        "return [bool(b) for b in np.random.rand(len(given.records)) > 0.5]",
        "two calls with the same group",
    ),
    "a negative rate": ("lr_scheduler_type", "return 1e-6 * (3 - given)", "for step 4"),
    "no rate": ("lr_scheduler_type", "return None", "it returned None for step 1"),
    "no function": ("on_step", "pass\nown = 3", "it is no function"),
    "two arguments": ("on_step", "pass\ndef own(a, b): pass", "called with one argument"),
    "async": ("on_step", "pass\nasync def own(a): pass", "it is async"),
}


def sections(folder: Path, flag: str, body: str) -> tuple[AlgorithmSection, TrainerSection]:
    path = folder / "own.py"
    path.write_text(f"import numpy as np\n\n\ndef own(given):\n    {body}\n")
    values: dict[str, Any] = {flag: f"{path}:own"}
    if flag in AlgorithmSection.model_fields:
        return AlgorithmSection(**values), TrainerSection()
    return AlgorithmSection(), TrainerSection(**values)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_function_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    flag, body, remedy = WRONG[mistake]
    with pytest.raises(ConfigError) as error:
        try_functions(*sections(tmp_path, flag, body))
    assert remedy in str(error.value)
    assert str(error.value).startswith(f"--{flag} ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "body"),
    [
        ("advantage_estimator", "return given.rewards - np.median(given.rewards)"),
        ("group_filter", "return [record.score is not None for record in given.records]"),
        ("lr_scheduler_type", "return 1e-5 / given"),
        ("on_step", "raise RuntimeError"),
    ],
)
def test_right_functions_pass(flag: str, body: str, tmp_path: Path) -> None:
    try_functions(*sections(tmp_path, flag, body))


def test_own_advantages_and_filters_are_used(tmp_path: Path) -> None:
    algorithm, _ = sections(
        tmp_path, "advantage_estimator", "return given.rewards - given.rewards.max()"
    )
    found = group_advantages([1.0, None, 0.0], kind=algorithm.advantage_estimator, sign_clip=False)
    np.testing.assert_equal(found, [0.0, np.nan, -1.0])
    (tmp_path / "filter").mkdir()
    algorithm, _ = sections(
        tmp_path / "filter", "group_filter", "return [r.num_turns < 3 for r in given.records]"
    )
    records = [RecordFacts(str(turns), float(turns % 2), turns, "answered") for turns in (1, 2, 3)]
    group = GroupFacts("task", (*records, RecordFacts("lost", None, 4, None)))
    reasons = filter_group(group, own_filter=algorithm.group_filter)
    assert reasons == (None, None, "group_filter", "no_score")


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ("return np.zeros(len(tree.scores))", "one finite value a turn"),
        ("return list(tree.rewards)", "NumPy array of float64"),
        ("return np.full(len(tree.before), np.nan)", "one finite value a turn"),
        ("return np.random.rand(len(tree.before))", "two calls with the same tree"),
        ("tree.rewards[:] = 1.0; return tree.rewards", "in place"),
        ("return tree.advantages", "AttributeError"),
    ],
)
def test_a_wrong_function_of_a_tree_is_refused(body: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TREE_HEADER + body)
    algorithm = AlgorithmSection(advantage_estimator=f"{path}:own")
    with pytest.raises(ConfigError, match=remedy):
        try_functions(algorithm, TrainerSection())


def test_a_function_of_a_tree_is_tried_on_one_that_branches(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TREE_HEADER + "return tree.mean_return(tree.passes[:, 0], tree.depths)")
    try_functions(AlgorithmSection(advantage_estimator=f"{path}:own"), TrainerSection())

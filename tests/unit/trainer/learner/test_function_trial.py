"""Each function of the user is called once before a run starts, and a mistake is one line that names it."""

from pathlib import Path

import numpy as np
import pytest

from agentrl.algorithms.advantages import group_advantages
from agentrl.algorithms.filters import GroupFacts, RecordFacts, filter_group
from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.checks.preflight import check_functions
from agentrl.trainer.learner.function_trial import try_functions

LOSS = """
import torch
from agentrl.algorithms.losses import LOSSES, plain_losses


def own(inputs, **settings):
    surprise = -inputs.advantages * inputs.policy_logprobs
"""
PLAIN = """
import numpy as np


def own(given):
"""
TREE = """
import numpy as np
from agentrl.algorithms.tree_credit import TurnTree


def own(tree: TurnTree):
"""
L, A, F, R = "loss_calculator", "advantage_estimator", "group_filter", "lr_scheduler_type"
WRONG = {
    "a sum over tokens": (L, LOSS, "return surprise.sum()", "without sum or mean"),
    "a wrong length": (L, LOSS, "return surprise[:-1]", "each of the 24 target tokens"),
    "NaN": (L, LOSS, "return surprise / 0.0 * 0.0", "its loss is not finite"),
    "a detached loss": (L, LOSS, "return surprise.detach()", "no gradient reaches policy_logprobs"),
    "an unused input": (
        L,
        LOSS,
        "return surprise.detach() * torch.ones(1, requires_grad=True)",
        "no gradient reaches policy_logprobs",
    ),
    "a gradient that is NaN": (
        L,
        LOSS,
        "return surprise + 0.0 * (0.0 * inputs.policy_logprobs).abs().sqrt()",
        "its gradient is not finite",
    ),
    "nothing": (L, LOSS, "return None", "it returned NoneType"),
    "another dtype": (L, LOSS, "return surprise.double()", "in the dtype of policy_logprobs"),
    "an exception": (L, LOSS, "return inputs.rewards", "own.py:8: AttributeError"),
    "a long message": (L, LOSS, "raise ValueError('first\\nsecond')", "ValueError: first second"),
    "an infinite metric": (
        L,
        LOSS,
        "return surprise, {'mean': surprise / 0}",
        "its mean is not finite",
    ),
    "a mask of numbers": (
        L,
        LOSS,
        "return plain_losses(inputs, surprise)._replace(keep=torch.ones(len(surprise)))",
        "keep is torch.float32; return bool",
    ),
    "a list": (A, PLAIN, "return list(given.rewards)", "not list"),
    "float32": (A, PLAIN, "return given.rewards.astype('f4')", "not float32"),
    "0 / 0": (A, PLAIN, "return given.rewards / 0", "not finite"),
    "a value a rollout": (A, TREE, "return np.zeros(len(tree.scores))", "one finite value a turn"),
    "no such field": (A, TREE, "return tree.advantages", "AttributeError"),
    "one bool": (F, PLAIN, "return True", "one bool for each of the 2 records"),
    "a rate above 1": (R, PLAIN, "return 3", "it returned 3 for step 1"),
    "no rate": (R, PLAIN, "return None", "it returned None for step 1"),
    "no function": ("on_step", PLAIN, "pass\nown = 3", "it is no function"),
    "no rule": ("branch_rule", "", "x = 1", "own"),
}


def config_of(folder: Path, flag: str, header: str, body: str) -> RootConfig:
    path = folder / "own.py"
    path.write_text(f"{header}    {body}\n" if header else f"{body}\n")
    more = {"rollouts": "tree", "num_generations": 4} if flag == "branch_rule" else {}
    return build_config({flag: f"{path}:own", **more})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_function_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    flag, header, body, remedy = WRONG[mistake]
    with pytest.raises(ConfigError) as error:
        try_functions(config_of(tmp_path, flag, header, body))
    assert remedy in str(error.value)
    assert str(error.value).startswith(f"--{flag}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "header", "body"),
    [
        *(
            (L, LOSS, f"return LOSSES.formula('{kind}')(inputs)")
            for kind in ("GRPO", "MINIRL", "GSPO", "CISPO", "REINFORCE")
        ),
        (A, PLAIN, "return given.rewards - np.median(given.rewards)"),
        (A, TREE, "return tree.mean_return(tree.passes[:, 0], tree.depths)"),
        (F, PLAIN, "return [record.score is not None for record in given.records]"),
        (R, PLAIN, "return 1e-5 / given"),
        ("on_step", PLAIN, "raise RuntimeError"),
    ],
)
def test_right_functions_pass(flag: str, header: str, body: str, tmp_path: Path) -> None:
    try_functions(config_of(tmp_path, flag, header, body))


def test_arguments_reach_the_loss(tmp_path: Path) -> None:
    config = config_of(tmp_path, L, LOSS, "return surprise * settings['scale']")
    with pytest.raises(ConfigError, match="KeyError"):
        try_functions(config)
    algorithm = config.algorithm.model_copy(update={"loss_args": {"scale": 2.0}})
    try_functions(config.model_copy(update={"algorithm": algorithm}))


def test_the_launcher_calls_them_in_another_process(tmp_path: Path) -> None:
    check_functions(RootConfig())
    check_functions(config_of(tmp_path, L, LOSS, "print('loss'); return surprise"))
    with pytest.raises(ConfigError, match=r"^--loss_calculator .* without sum or mean$"):
        check_functions(config_of(tmp_path, L, LOSS, "return surprise.sum()"))
    with pytest.raises(ConfigError, match=r"^--loss_calculator .*: the trial ended with status 3"):
        check_functions(config_of(tmp_path, L, LOSS, "import os; os._exit(3)"))


def test_own_advantages_and_filters_are_used(tmp_path: Path) -> None:
    own = config_of(tmp_path, A, PLAIN, "return given.rewards - given.rewards.max()").algorithm
    found = group_advantages([1.0, None, 0.0], kind=own.advantage_estimator, sign_clip=False)
    np.testing.assert_equal(found, [0.0, np.nan, -1.0])
    (tmp_path / "filter").mkdir()
    body = "return [r.num_turns < 3 for r in given.records]"
    own = config_of(tmp_path / "filter", F, PLAIN, body).algorithm
    records = [RecordFacts(str(turns), float(turns % 2), turns, "answered") for turns in (1, 2, 3)]
    group = GroupFacts("task", (*records, RecordFacts("lost", None, 4, None)))
    reasons = filter_group(group, own_filter=own.group_filter)
    assert reasons == (None, None, "group_filter", "no_score")

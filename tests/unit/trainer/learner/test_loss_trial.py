"""Each mistake in a user's loss is one line that names the flag and the remedy, before a run starts."""

from pathlib import Path

import pytest

from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.checks.function_checks import check_functions
from agentrl.trainer.learner.loss_trial import try_loss

HEADER = """
import time
import torch
from agentrl.algorithms.losses import LossInputs, TargetLosses, plain_losses, sequence_sums

calls = []


def loss(inputs, **settings):
    surprise = -inputs.advantages * inputs.policy_logprobs
"""

WRONG = {
    "a sum over tokens": ("return surprise.sum()", "without sum or mean"),
    "a wrong length": ("return surprise[:-1]", "one value for each of the 24 target tokens"),
    "NaN": ("return surprise / 0.0 * 0.0", "not finite"),
    "a detached loss": ("return surprise.detach()", "no gradient reaches policy_logprobs"),
    "numbers instead of tensors": ("return surprise.tolist()", "it returned list"),
    "nothing": ("return None", "it returned NoneType"),
    "another dtype": ("return surprise.double()", "compute in the dtype of policy_logprobs"),
    "inputs changed in place": (
        "inputs.advantages.clamp_(min=0.0); return surprise",
        "changes inputs.advantages in place",
    ),
    "a mean over the micro-batch": ("return surprise / len(surprise)", "its own turn alone"),
    "sums over records": (
        "return surprise * sequence_sums(inputs.policy_logprobs, inputs.records)",
        "its own turn alone",
    ),
    "places in the micro-batch": (
        "return surprise * torch.arange(len(surprise))",
        "its own turn alone",
    ),
    "random numbers": ("return surprise * torch.rand(len(surprise))", "two calls with the same"),
    "state between calls": (
        "calls.append(1); return surprise * len(calls)",
        "two calls with the same",
    ),
    "a print": ("print('loss', surprise); return surprise", "it prints"),
    "a sleep": ("time.sleep(1.2); return surprise", "for 24 tokens; move the work out"),
    "an exception": ("return surprise + inputs.rewards", "own.py:11: AttributeError"),
    "a long message": ("raise ValueError('first\\nsecond')", "ValueError: first second"),
    "no targets": ("assert len(surprise); return surprise", "without targets"),
    "three results": ("return surprise, {}, {}", "it returned a tuple of 3"),
    "a metric that is a number": (
        "return surprise, {'mean': len(surprise)}",
        "the metric mean must be a tensor with one value for each",
    ),
    "a gradient that is NaN": (
        "return surprise + 0.0 * (inputs.behavior - inputs.behavior + 0.0 * "
        "inputs.policy_logprobs).abs().sqrt()",
        "its gradient is not finite",
    ),
    "a mask of numbers": (
        "return plain_losses(inputs, surprise)._replace(keep=torch.ones(len(surprise)))",
        "keep is torch.float32; return bool",
    ),
}


def written(folder: Path, body: str, header: str = HEADER) -> AlgorithmSection:
    path = folder / "own.py"
    path.write_text(f"{header}    {body}\n")
    return AlgorithmSection(loss_calculator=f"{path}:loss")


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_loss_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    body, remedy = WRONG[mistake]
    algorithm = written(tmp_path, body)
    with pytest.raises(ConfigError) as error:
        try_loss(algorithm)
    assert remedy in str(error.value)
    assert str(error.value).startswith(f"--loss_calculator {algorithm.loss_calculator}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["GRPO", "MINIRL", "GSPO", "CISPO", "REINFORCE"])
def test_built_in_losses_pass_the_trial_as_a_users(kind: str, tmp_path: Path) -> None:
    algorithm = written(
        tmp_path,
        f"return LOSSES.formula('{kind}')(inputs)",
        "from agentrl.algorithms.losses import LOSSES\ndef loss(inputs):\n",
    )
    try_loss(algorithm)


def test_arguments_reach_the_loss(tmp_path: Path) -> None:
    algorithm = written(tmp_path, "return surprise * settings['scale']")
    with pytest.raises(ConfigError, match="KeyError"):
        try_loss(algorithm)
    try_loss(algorithm.model_copy(update={"loss_args": {"scale": 2.0}}))


def test_the_launcher_tries_a_loss_in_its_own_process(tmp_path: Path) -> None:
    config = RootConfig(algorithm=written(tmp_path, "return surprise"))
    check_functions(config)
    config = RootConfig(algorithm=written(tmp_path, "return surprise.sum()"))
    with pytest.raises(ConfigError, match="without sum or mean"):
        check_functions(config)
    config = RootConfig(algorithm=written(tmp_path, "import os; os._exit(3)"))
    with pytest.raises(ConfigError, match="ended with status 3"):
        check_functions(config)

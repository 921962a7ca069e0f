from typing import Any

import pytest

from agentrl.config.optimizer_arguments import OptimizerArguments, parse_optim_args
from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError
from agentrl.trainer.learner.optimizer import learning_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", OptimizerArguments()),
        ("beta1=0.5", OptimizerArguments(beta1=0.5)),
        ("adam_beta2=0.9, adam_epsilon=1e-6", OptimizerArguments(beta2=0.9, eps=1e-6)),
    ],
)
def test_optim_args_override_the_defaults(text: str, expected: OptimizerArguments) -> None:
    assert parse_optim_args(text) == expected


@pytest.mark.parametrize("text", ["momentum=0.9", "beta1=high", "beta1=1.0", "eps=0"])
def test_wrong_optim_args_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--optim_args"):
        parse_optim_args(text)


def rates(**flags: Any) -> list[float]:
    config = TrainerSection(learning_rate=1.0, **flags)
    return [round(learning_rate(config, step), 4) for step in range(config.max_steps)]


def test_constant_rate_after_warmup() -> None:
    assert rates(max_steps=5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_rate_falls_towards_zero() -> None:
    assert rates(max_steps=4, lr_scheduler_type="linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine_rate_is_half_in_the_middle() -> None:
    assert rates(max_steps=4, lr_scheduler_type="cosine") == [1.0, 0.8536, 0.5, 0.1464]

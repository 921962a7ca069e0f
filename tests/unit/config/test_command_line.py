"""Flags as they are typed. What their values may be is in `test_loading`."""

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.flags import NO_EFFECT
from agentrl.errors import ConfigError


def test_underscores_and_hyphens_are_alike() -> None:
    assert parse_flags(["--max-steps", "7"]) == parse_flags(["--max_steps", "7"])


def test_the_original_misspelling_is_accepted() -> None:
    config = parse_flags(["--loss_calculater", "MINIRL"])
    assert config.algorithm.loss_calculator == "MINIRL"


def test_a_bool_flag_stands_alone_or_takes_a_value() -> None:
    assert parse_flags(["--strict_in_bound"]).algorithm.strict_in_bound
    assert not parse_flags(["--sign_clip", "false"]).algorithm.sign_clip


def test_negative_values_are_not_mistaken_for_flags() -> None:
    assert parse_flags(["--top_k", "-1"]).sampling.top_k == -1


def test_the_last_of_two_values_counts() -> None:
    assert parse_flags(["--max_steps", "3", "--max_steps=5"]).trainer.max_steps == 5


def test_a_value_that_begins_like_a_flag_follows_an_equals_sign() -> None:
    assert parse_flags(["--sglang_args=--dp 1"]).inference.sglang_args == "--dp 1"
    with pytest.raises(ConfigError, match=r"^--sglang_args needs a value$"):
        parse_flags(["--sglang_args", "--dp 1"])


def test_flags_of_the_original_are_accepted() -> None:
    argv = ["--bf16", "--pp_size", "1", "--cpu_ram_efficient_loading", "true"]
    assert parse_flags(argv).model.torch_dtype == "bfloat16"
    assert parse_flags(["--bf16", "false"]).model.torch_dtype == "auto"
    assert parse_flags(["--bf16", "--torch_dtype", "float32"]).model.torch_dtype == "float32"
    with pytest.raises(ConfigError, match=r"^--bf16: Input should be a valid boolean, got 'x'$"):
        parse_flags(["--bf16", "x"])


@pytest.mark.parametrize("flag", NO_EFFECT)
def test_a_flag_without_effect_may_stand_alone(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_flags([f"--{flag}"]) == parse_flags([f"--{flag}", "1"]) == parse_flags([])
    assert capsys.readouterr().err.count(f"note: --{flag} has no effect here") == 2

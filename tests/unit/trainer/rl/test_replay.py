"""The flags of a replayed step, which anybody may have written into the run's database."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.loading import build_config, flat_values
from agentrl.errors import ConfigError
from agentrl.schema.run import ConfigChange, Run
from agentrl.trainer.rl.replay import config_of_steps

STEPS = range(1, 3)


def stored_run(before: dict[str, Any], now: dict[str, Any] | None = None) -> Run:
    """A run whose first steps had other flags, by what its database says."""
    return Run(
        name="theirs",
        config=now or flat_values(build_config({})),
        config_log=(ConfigChange(step=2, before=before),),
        imported_policies=(),
    )


@pytest.mark.parametrize(
    "before",
    [
        {"loss_calculator": "pydoc:pipepager", "loss_args": {"cmd": "touch PWNED"}},
        {"loss_args": {"cmd": "touch PWNED"}},
        {"advantage_estimator": "theirs.py:advantage"},
        {"group_filter": "os:system"},
        {"lr_scheduler_type": "os.path:join"},
        {"lr_scheduler_type": {"os.path:join": 1}},
    ],
)
def test_a_database_names_no_code(before: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"^the database of run 'theirs' sets --\w+ to .* only you can name code"
    ) as refused:
        config_of_steps(STEPS, build_config({}), stored_run(before))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "before",
    [
        {"model_name_or_path": "/home/them/model", "trust_remote_code": True},
        {"on_step": "os:system", "chat_template": "/etc/passwd"},
        {"agent": "theirs.py:run", "env": "verifiers:theirs", "report_to": ["wandb"]},
        {"loss_calculater": "pydoc:pipepager"},
        {"own_sources": ["loss_calculator"]},
    ],
)
def test_what_determines_no_step_is_not_read_from_a_database(before: dict[str, Any]) -> None:
    config = build_config({})
    assert config_of_steps(STEPS, config, stored_run(before)) == config


def test_the_steps_own_flags_are_used_and_what_the_user_names_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(inputs, a):\n    return inputs.logprobs\n")
    own = build_config({"loss_calculator": f"{mine}:loss", "loss_args": {"a": 1}})
    before = {"loss_calculator": f"{mine}:loss", "loss_args": {"a": 1}, "learning_rate": 0.5}
    used = config_of_steps(STEPS, own, stored_run(before))
    assert used.algorithm == own.algorithm
    assert used.trainer.learning_rate == 0.5

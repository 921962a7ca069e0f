"""The engine `trl`: TRL's `GRPOTrainer` learns from rollouts that our samplers play.

Store, inference servers, samplers and gateway are those of the engine `agentrl`; a process of TRL
stands where our trainer stands.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.integrations.agent_worker.interpreters import has_package
from agentrl.integrations.native_engine import AgentRLEngine
from agentrl.integrations.settings import load_settings
from agentrl.integrations.trl.trl_settings import check_flags, grpo_arguments

ARGUMENTS_FILE = "trl.json"
REQUIREMENT = "trl>=1.16,<2"


class TrlEngine(AgentRLEngine):
    """Trains with TRL's `GRPOTrainer`.

    The configuration's keys are the flags of `agentrl run`, without those of losses and of our
    trainer (but with `max_steps`, `groups_per_step` and `learning_rate`), and:
        trl: a mapping of further arguments of TRL's `GRPOConfig`.
        agent_processes, training_python: as for the engine `agentrl`; `training_python` has trl.
    """

    def check_config(self, config: Any) -> RootConfig:
        """Fill in what the other arguments say, check all flags, and write the run's files."""
        settings = load_settings(config)
        given = settings.pop("trl", None) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"config: trl must be a mapping, got {given!r}")
        check_flags(settings)
        settings.setdefault("agent_sampling", "run")
        checked = super().check_config(settings)
        arguments = grpo_arguments(checked, given)
        if not has_package(self._python, "trl", os.environ):
            raise ConfigError(
                f"train_engine_name: trl is not installed for {self._python}; install it with "
                f"{self._python} -m pip install '{REQUIREMENT}'"
            )
        try:
            text = json.dumps(arguments, indent=2, ensure_ascii=False)
        except TypeError as error:
            raise ConfigError(f"config: trl: only plain values can be given ({error})") from None
        (self.run_path / ARGUMENTS_FILE).write_text(text + "\n", encoding="utf-8")
        return checked

    def _training_command(self) -> list[str]:
        return ["agentrl.integrations.trl.trl_process", str(self.arguments_path)]

    @property
    def arguments_path(self) -> Path:
        """The arguments of TRL's `GRPOConfig`."""
        return self.run_path / ARGUMENTS_FILE

"""The engine `trl`: TRL's `GRPOTrainer` learns from rollouts of AgentRL's samplers.

Store, inference servers and samplers are those of the engine `agentrl`; a TRL process replaces
AgentRL's trainer.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.flags import canonical_name
from agentrl.config.sections import (
    AlgorithmSection,
    DataSection,
    InferenceSection,
    RootConfig,
    TrainerSection,
)
from agentrl.config.validation.checks import groups_per_step
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.engine_settings import has_package, load_settings
from agentrl.plugins.integrations.native_engine import NativeEngine
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor

ARGUMENTS_FILE = "trl.json"
REQUIREMENT = "trl>=1.16,<2"
_SHARED = {"max_steps", "groups_per_step", "learning_rate", "eval_timeout_seconds"}
"""Flags of AgentRL's trainer with the same meaning here."""
_UNSUPPORTED_FLAGS = {*AlgorithmSection.model_fields, *TrainerSection.model_fields} - _SHARED | (
    {"num_train_epochs", "records_of", "min_score"} & set(DataSection.model_fields)
    | {"colocated", "share_gpus"} & set(InferenceSection.model_fields)
)
"""Flags that only AgentRL's own trainer reads."""
_FROM_FLAGS = {
    "gradient_accumulation_steps": "groups_per_step",
    "learning_rate": "learning_rate",
    "max_steps": "max_steps",
    "model_init_kwargs": "torch_dtype and trust_remote_code",
    "num_generations": "num_generations",
    "output_dir": "run_path",
    "seed": "seed",
    "shuffle_dataset": "shuffle",
    "temperature": "temperature",
}
"""Argument of `GRPOConfig` -> the flag that sets it."""


class TrlEngine(NativeEngine):
    """Trains with TRL's `GRPOTrainer`.

    The configuration's keys are the flags of `agentrl run`, without those of losses and of
    AgentRL's trainer (except `max_steps`, `groups_per_step` and `learning_rate`), and:
        trl: a mapping of further arguments of TRL's `GRPOConfig`.
        agent_processes, training_python: as for the engine `agentrl`; `training_python` needs trl.
    """

    trains_by_itself = False
    check_environment = TrainerProcessor.check_environment

    def check_config(self, config: Any) -> RootConfig:
        """Add flags that follow from the other arguments, check all, and write the run's files."""
        settings = load_settings(config)
        given = settings.pop("trl", None) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"config: trl must be a mapping, got {given!r}")
        _check_flags(settings)
        settings.setdefault("agent_sampling", "run")
        checked = super().check_config(settings)
        arguments = _grpo_arguments(checked, given)
        try:
            text = json.dumps(arguments, indent=2, ensure_ascii=False)
        except TypeError as error:
            raise ConfigError(f"config: trl: only plain values are supported ({error})") from None
        (self.run_path / ARGUMENTS_FILE).write_text(text + "\n", encoding="utf-8")
        return checked

    def _check_policy(self, config: RootConfig) -> None:
        if not has_package(self._python, "trl", os.environ):
            raise ConfigError(
                f"train_engine_name: trl is not installed for {self._python}; install it with "
                f"{self._python} -m pip install '{REQUIREMENT}'"
            )
        super()._check_policy(config)

    def _training_command(self) -> list[str]:
        return ["agentrl.plugins.integrations.trl.trl_process", str(self.arguments_path)]

    @property
    def arguments_path(self) -> Path:
        """The arguments of TRL's `GRPOConfig`."""
        return self.run_path / ARGUMENTS_FILE


def _check_flags(names: Iterable[str]) -> None:
    """Reject flags that only AgentRL's own trainer reads."""
    for name in names:
        if canonical_name(name) in _UNSUPPORTED_FLAGS:
            raise ConfigError(
                f"config: {name} is supported only by AgentRL's own trainer; put arguments of "
                "TRL's GRPOConfig in a mapping `trl`"
            )


def _grpo_arguments(config: RootConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig` from the flags and the user's mapping."""
    for name, flag in _FROM_FLAGS.items():
        if name in given:
            raise ConfigError(f"config: trl.{name}: set {flag} instead, outside of `trl`")
    if given.get("use_vllm"):
        raise ConfigError("config: trl.use_vllm: the run's inference servers generate; remove it")
    if "hub_token" in given:
        raise ConfigError("config: trl.hub_token would be stored in a file; set HF_TOKEN instead")
    if config.agents.agent_sampling != "run":
        raise ConfigError(
            "config: agent_sampling: TRL supports one temperature for all tokens; use `run`"
        )
    if config.sampling.temperature == 0:
        raise ConfigError(
            "config: temperature: 0 makes all rollouts of a question identical; use a higher one"
        )
    num_generations = config.data.num_generations
    batch_size = given.get("per_device_train_batch_size", num_generations)
    num_rollouts = groups_per_step(config) * num_generations
    if not isinstance(batch_size, int) or batch_size < 1 or num_rollouts % batch_size:
        raise ConfigError(
            f"config: trl.per_device_train_batch_size must divide the {num_rollouts} rollouts of a "
            f"step (groups_per_step x num_generations), got {batch_size!r}"
        )
    model: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    if config.model.torch_dtype != "auto":
        model["dtype"] = config.model.torch_dtype
    return {
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": batch_size,
        **given,
        "gradient_accumulation_steps": num_rollouts // batch_size,
        "learning_rate": config.trainer.learning_rate,
        "max_steps": config.trainer.max_steps,
        "model_init_kwargs": model,
        "num_generations": num_generations,
        "output_dir": str(config.run.output_path / "trl"),
        "seed": config.run.seed,
        "shuffle_dataset": config.data.shuffle,
        "temperature": config.sampling.temperature,
    }

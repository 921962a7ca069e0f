"""Defaults of `agentrl sft`, where they differ from those of reinforcement learning."""

from collections.abc import Mapping
from typing import Any, TypeVar

from agentrl.config.sections import ConfigSection, RootConfig

_Section = TypeVar("_Section", bound=ConfigSection)
_BATCH_SIZE, _NUM_EPOCHS = 8, 3
"""As in Hugging Face's Trainer."""
_LEARNING_RATE, _ADAPTER_LEARNING_RATE = 2e-5, 2e-4
"""As in TRL; an adapter needs about ten times the rate of the full weights."""


def with_fine_tuning_defaults(config: RootConfig) -> RootConfig:
    """Return the configuration with the values of supervised fine-tuning for unset flags.

    Conversations are short and their loss has little noise, so steps are smaller and more than in
    reinforcement learning, and the learning rate is higher. Held-out conversations are evaluated
    before the first and after the last step, unless the user says otherwise.
    """
    rate = _ADAPTER_LEARNING_RATE if config.model.lora_rank else _LEARNING_RATE
    trainer: dict[str, Any] = {
        "per_device_train_batch_size": _BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "learning_rate": rate,
    }
    if config.data.eval_file is not None:
        trainer["eval_strategy"] = "ends"
    sections: dict[str, Any] = {
        "trainer": _with_unset(config.trainer, trainer),
        "data": _with_unset(config.data, {"num_train_epochs": _NUM_EPOCHS}),
    }
    return config.model_copy(update=sections)


def _with_unset(section: _Section, values: Mapping[str, Any]) -> _Section:
    unset = {name: value for name, value in values.items() if name not in section.model_fields_set}
    return section.model_copy(update=unset)

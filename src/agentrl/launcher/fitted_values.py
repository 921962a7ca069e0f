"""Defaults that depend on the model's context and the machine's memory.

Input: a checked configuration whose model exists. Output: the configuration with these values
filled in, and a note on each. Values from flags or files are never changed.
"""

from pathlib import Path
from typing import Literal

from agentrl.config.sections import RootConfig
from agentrl.models.checkpoints.architectures import missing_scan_kernels, raw_config
from agentrl.rollout.worker.resources import served_context_length

_MIN_REPLY_TOKENS = 1024
"""Tokens of the context that are kept free for a reply, but at most a quarter of the context."""
CPU_TOKENS = 8192
"""Tokens per forward pass on a CPU; more would need memory without saving time."""
FITTED_OF_TRAINER = frozenset({"max_tokens", "gradient_checkpointing"})
"""Trainer flags that may be filled in; with several machines, machine 0 does it for all."""
_LONG_CONTEXT_TOKENS = 8192
"""Path length in tokens from which activations are recomputed."""


def fitted_to_model(
    config: RootConfig, model_path: Path, *, trains_on: Literal["cpu", "gpu"] | None = None
) -> tuple[RootConfig, list[str]]:
    """Return the configuration with defaults for the model and machine, and notes about them.

    Args:
        config: the checked configuration.
        model_path: the model's directory, with config.json.
        trains_on: the device of the trainer, if this is for one on this machine.

    Raises:
        ConfigError: config.json is malformed.
    """
    notes: list[str] = []
    if "model_name_or_path" not in config.model.model_fields_set:
        notes.append(
            "no --model_name_or_path: using the demo's tiny model, which knows only the demo's "
            "tools, such as `stock(item)` and `add(a, b)`"
        )
    if trains_on == "cpu":
        config = _with_default(config, "trainer", "max_tokens", CPU_TOKENS, "without a GPU", notes)
    elif trains_on == "gpu":
        kernels = missing_scan_kernels(raw_config(model_path))
        if kernels is not None:
            notes.append(
                f"{kernels} is not installed: the model's recurrent layers take many times as long; "
                f"pip install {kernels}"
            )
    context = served_context_length(config.inference, model_path)
    if context is None:
        return config, notes
    reason = f"because the model's context is {context} tokens"
    prompt = min(config.sampling.max_prompt_tokens, context - min(_MIN_REPLY_TOKENS, context // 4))
    config = _with_default(config, "sampling", "max_prompt_tokens", prompt, reason, notes)
    if min(context, config.trainer.max_tokens) > _LONG_CONTEXT_TOKENS:
        config = _with_default(config, "trainer", "gradient_checkpointing", True, reason, notes)
    return config, notes


def _with_default(
    config: RootConfig, section: str, key: str, value: object, reason: str, notes: list[str]
) -> RootConfig:
    """Return the configuration with a value for a flag that was not given; add a note if it changes."""
    values = getattr(config, section)
    if key in values.model_fields_set or getattr(values, key) == value:
        return config
    notes.append(f"--{key} {str(value).lower()}, {reason}")
    return config.model_copy(update={section: values.model_copy(update={key: value})})

"""Defaults that depend on the model's context and the machine's memory.

Input: a checked configuration whose model exists. Output: the configuration with these values
filled in, and a note on each. Values from flags or files are never changed.
"""

from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.rollout.worker.resources import served_context_length

_LEAST_REPLY = 1024
"""Tokens that a context keeps free for one more reply, in models that have four times as many."""
CPU_TOKENS = 8192
"""Tokens per forward pass on a CPU; more would need memory without saving time."""
FITTED_OF_TRAINER = frozenset({"max_tokens", "gradient_checkpointing"})
"""Trainer flags that may be filled in; with several machines, machine 0 does it for all."""
_LONG_CONTEXT = 8192
"""Path length in tokens from which activations are recomputed."""


def fitted_to_model(
    config: RootConfig, model_path: Path, *, trains_on_cpu: bool = False
) -> tuple[RootConfig, list[str]]:
    """Return the configuration with defaults for the model and machine, and notes about them.

    Args:
        config: the checked configuration.
        model_path: the model's directory, with config.json.
        trains_on_cpu: whether this is for a trainer without a GPU.

    Raises:
        ConfigError: config.json is malformed.
    """
    notes: list[str] = []
    if "model_name_or_path" not in config.model.model_fields_set:
        notes.append(
            "no --model_name_or_path: using the demo's tiny model, which knows only the demo's "
            "tools, such as `stock(item)` and `add(a, b)`"
        )
    if trains_on_cpu:
        config = _fitted(config, "trainer", "max_tokens", CPU_TOKENS, "without a GPU", notes)
    context = served_context_length(config.inference, model_path)
    if context is None:
        return config, notes
    why = f"because the model's context is {context} tokens"
    prompt = min(config.sampling.max_prompt_tokens, context - min(_LEAST_REPLY, context // 4))
    config = _fitted(config, "sampling", "max_prompt_tokens", prompt, why, notes)
    if min(context, config.trainer.max_tokens) > _LONG_CONTEXT:
        config = _fitted(config, "trainer", "gradient_checkpointing", True, why, notes)
    return config, notes


def _fitted(
    config: RootConfig, section: str, key: str, value: object, why: str, notes: list[str]
) -> RootConfig:
    """Return the configuration with a value that was not given, and add a note if it changes."""
    values = getattr(config, section)
    if key in values.model_fields_set or getattr(values, key) == value:
        return config
    notes.append(f"--{key} {str(value).lower()}, {why}")
    return config.model_copy(update={section: values.model_copy(update={key: value})})

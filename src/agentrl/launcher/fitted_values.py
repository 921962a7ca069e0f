"""Values that nobody gave: the model, and what follows from its context for prompts and memory.

In goes a checked configuration whose model exists; out comes one with these values filled in, and a
line for a person on each. A value that a flag or a file gave is never touched.
"""

from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.rollout.worker.resources import served_context_length

_LEAST_REPLY = 1024
"""Tokens that a context keeps free for one more reply, in models that have four times as many."""
_LONG_CONTEXT = 8192
"""Tokens above which activations of a whole path are kept only in part."""


def fitted_to_model(config: RootConfig, model_path: Path) -> tuple[RootConfig, list[str]]:
    """Return the configuration with what the model's context says, and notes about it.

    Args:
        config: the checked configuration.
        model_path: the model's directory, with config.json.

    Raises:
        ConfigError: config.json is malformed.
    """
    notes: list[str] = []
    if "model_name_or_path" not in config.model.model_fields_set:
        notes.append(
            "no --model_name_or_path: this is the demo's tiny model, which knows its tools only, such "
            "as `stock(item)` and `add(a, b)`"
        )
    context = served_context_length(config.inference, model_path)
    if context is None:
        return config, notes
    prompt = min(config.sampling.max_prompt_tokens, context - min(_LEAST_REPLY, context // 4))
    path = min(context, config.trainer.max_tokens)
    wanted: tuple[tuple[str, dict[str, Any]], ...] = (
        ("sampling", {"max_prompt_tokens": prompt}),
        ("trainer", {"gradient_checkpointing": True} if path > _LONG_CONTEXT else {}),
    )
    for name, values in wanted:
        section = getattr(config, name)
        missing = {key: values[key] for key in values.keys() - section.model_fields_set}
        changed = {key: new for key, new in missing.items() if new != getattr(section, key)}
        notes += [
            f"--{key} {str(value).lower()}, as the model's context is {context} tokens"
            for key, value in changed.items()
        ]
        config = config.model_copy(update={name: section.model_copy(update=changed)})
    return config, notes

"""Defaults that depend on the model's context and the machine's memory.

Input: a checked configuration whose model exists. Output: the configuration with these values
filled in, and a note on each. Values from flags or files are never changed.
"""

import math
import os
from pathlib import Path
from typing import Literal

from agentrl.config.sections import RootConfig
from agentrl.config.validation.checks import groups_per_step
from agentrl.models.checkpoints.architectures import missing_scan_kernels, raw_config
from agentrl.models.checkpoints.checkpoint_files import num_parameters as checkpoint_parameters
from agentrl.rollout.worker.resources import served_context_length
from agentrl.runtime.printable import counted

_MIN_REPLY_TOKENS = 1024
"""Tokens of the context that are kept free for a reply, but at most a quarter of the context."""
CPU_TOKENS = 8192
"""Tokens per forward pass on a CPU; more would need memory without saving time."""
FITTED_OF_TRAINER = frozenset(
    {"max_tokens", "gradient_checkpointing", "learning_rate", "eval_strategy"}
)
"""Trainer flags that may be filled in; with several machines, machine 0 does it for all."""
_LONG_CONTEXT_TOKENS = 8192
"""Path length in tokens from which activations are recomputed."""
_FLOPS_OF_CORE = 4e10
"""Floating-point operations per second of a CPU core in a model's matrix products."""
_FLOPS_OF_TOKEN = 8
"""Operations per parameter and token: 2 to sample it, 6 to train on it."""
_STEP_SECONDS = 180.0
"""Time on a CPU in which a step's replies should be sampled and trained on."""
_REPLY_TOKENS = (128, 8192)
"""Range of the limit of a reply that is fitted to a CPU."""
_ADAPTER_RATE = 1e-5
"""Learning rate of an adapter, ten times that of all weights (Schulman et al., LoRA Without Regret)."""


def fitted_to_model(
    config: RootConfig,
    model_path: Path,
    *,
    trains_on: Literal["cpu", "gpu"] | None = None,
    samples_on: Literal["cpu", "gpu"] | None = None,
) -> tuple[RootConfig, list[str]]:
    """Return the configuration with defaults for the model and machine, and notes about them.

    Args:
        config: the checked configuration.
        model_path: the model's directory, with config.json.
        trains_on: the device of the trainer, if this is for one on this machine.
        samples_on: the device of the inference servers, if they are on this machine.

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
    if samples_on == "cpu":
        config = _with_short_replies(config, model_path, notes)
    if trains_on is not None:
        config = _with_trainer_defaults(config, notes)
    context = served_context_length(config.inference, model_path)
    if context is None:
        return config, notes
    reason = f"because the model's context is {context} tokens"
    prompt = min(config.sampling.max_prompt_tokens, context - min(_MIN_REPLY_TOKENS, context // 4))
    config = _with_default(config, "sampling", "max_prompt_tokens", prompt, reason, notes)
    if min(context, config.trainer.max_tokens) > _LONG_CONTEXT_TOKENS:
        config = _with_default(config, "trainer", "gradient_checkpointing", True, reason, notes)
    return config, notes


def _with_short_replies(config: RootConfig, model_path: Path, notes: list[str]) -> RootConfig:
    """Limit replies to what a CPU samples, and trains on, within minutes a step.

    A model that rambles reaches any limit: with 8,192 tokens a reply, a step of 48 of them takes a
    CPU hours.
    """
    num_parameters = checkpoint_parameters(model_path)
    if num_parameters is None:
        return config
    cores = len(os.sched_getaffinity(0))
    tokens = _STEP_SECONDS * cores * _FLOPS_OF_CORE / (_FLOPS_OF_TOKEN * num_parameters)
    replies = groups_per_step(config) * config.data.num_generations
    lowest, highest = _REPLY_TOKENS
    fitting = 1 << max(0, math.floor(math.log2(max(1.0, tokens / replies))))
    limit = min(highest, max(lowest, fitting))
    reason = (
        f"because a model of {num_parameters / 1e6:,.1f} million parameters takes minutes for the "
        f"{replies} replies of a step on {counted(cores, 'CPU core')}"
    )
    return _with_default(config, "sampling", "max_new_tokens", limit, reason, notes)


def _with_trainer_defaults(config: RootConfig, notes: list[str]) -> RootConfig:
    if config.model.lora_rank:
        reason = "because an adapter (--lora_rank) learns at higher rates than all weights"
        config = _with_default(config, "trainer", "learning_rate", _ADAPTER_RATE, reason, notes)
    if config.data.has_held_out:
        reason = "because there are held-out questions"
        config = _with_default(config, "trainer", "eval_strategy", "ends", reason, notes)
    return config


def _with_default(
    config: RootConfig, section: str, key: str, value: object, reason: str, notes: list[str]
) -> RootConfig:
    """Return the configuration with a value for a flag that was not given; add a note if it changes."""
    values = getattr(config, section)
    if key in values.model_fields_set or getattr(values, key) == value:
        return config
    notes.append(f"--{key} {str(value).lower()}, {reason}")
    return config.model_copy(update={section: values.model_copy(update={key: value})})

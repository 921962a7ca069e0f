"""Defaults that depend on the model's context and the machine's memory.

Input: a checked configuration whose model exists. Output: the configuration with these values
filled in, and a note on each. Values from flags or files are never changed. A resumed run keeps the
sizes with which it was started.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.config.flags import SETTINGS
from agentrl.config.loading import read_yaml
from agentrl.config.named_files import shipped_file
from agentrl.config.sections import RootConfig
from agentrl.config.validation.checks import groups_per_step
from agentrl.models.checkpoints.architectures import (
    decoder_config,
    missing_scan_kernels,
    raw_config,
)
from agentrl.rollout.worker.resources import served_context_length

_MIN_REPLY_TOKENS = 1024
"""Tokens of the context that are kept free for a reply, but at most a quarter of the context."""
CPU_TOKENS = 8192
"""Most tokens per forward pass on a CPU; more would need memory without saving time."""
_MIN_CPU_TOKENS = 1024
_ACTIVATIONS_SHARE = 0.4
"""Of the machine's memory, for what a forward pass on a CPU keeps for the backward pass."""
ADAPTER_LEARNING_RATE = 1e-5
"""Default with `--lora_rank`: ten times that of all weights."""
_SETS_STEP_SIZE = frozenset(
    {"groups_per_step", "per_device_train_batch_size", "gradient_accumulation_steps"}
)
_LONG_CONTEXT_TOKENS = 8192
"""Path length in tokens from which activations are recomputed."""
_SAMPLING_SECONDS = 120.0
"""Time in which a step should be sampled, if every reply has the maximum length."""
_FLOPS_PER_CORE = 1e10
"""Operations per second and core that batched decoding reaches in float32: 134 million weights at
74 tokens per second on two cores; 57 were measured beside other work."""
_MIN_CPU_REPLY_TOKENS = 256
"""Length that a short answer with its reasoning needs; a step gets fewer groups instead."""
_MIN_GROUPS = 2


@dataclass(frozen=True)
class _CpuLimits:
    """Sizes of a step on a CPU."""

    tokens_per_second: float
    """Estimated tokens per second of the embedded engine, all conversations together."""
    max_new_tokens: int
    """A power of two, so that it is the same on similar machines."""
    groups_per_step: int


def fitted_to_model(
    config: RootConfig,
    model_path: Path,
    *,
    trains_on: Literal["cpu", "gpu"] | None = None,
    samples_on: Literal["cpu", "gpu"] | None = None,
) -> tuple[RootConfig, list[str]]:
    """Return the configuration with defaults for the model and machine, and notes about them."""
    notes: list[str] = []
    if "model_name_or_path" not in config.model.model_fields_set:
        notes.append(
            "no --model_name_or_path: using the demo's tiny model, which knows only the demo's "
            "tools, such as `stock(item)` and `add(a, b)`"
        )
    if model_path.is_relative_to(shipped_file("assets/demo")):
        reason = "because the demo's models know how to answer"
        config = _with_default(config, "rollout", "answer_instruction", "none", reason, notes)
    before = _values_of_start(config) if trains_on is not None else {}
    if trains_on is not None:
        config = _with_trainer_defaults(config, before, notes)
    limits = _cpu_limits(config, model_path) if samples_on == "cpu" else None
    config = _with_reply_length(config, model_path, limits, before, notes)
    if limits is not None and trains_on is not None:
        config = _with_smaller_steps(config, limits, before, notes)
    if trains_on == "cpu":
        tokens = before.get("max_tokens", _tokens_in_memory(model_path))
        reason = "without a GPU" if tokens == CPU_TOKENS else "for the memory of this machine"
        config = _with_default(config, "trainer", "max_tokens", tokens, reason, notes)
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


def _with_trainer_defaults(
    config: RootConfig, before: dict[str, Any], notes: list[str]
) -> RootConfig:
    if config.model.lora_rank:
        rate = before.get("learning_rate", ADAPTER_LEARNING_RATE)
        reason = "because an adapter is trained"
        config = _with_default(config, "trainer", "learning_rate", rate, reason, notes)
    if config.data.has_held_out:
        reason = "because there are held-out questions"
        config = _with_default(config, "trainer", "eval_strategy", "ends", reason, notes)
    return config


def _cpu_limits(config: RootConfig, model_path: Path) -> _CpuLimits | None:
    """Return the sizes that the embedded engine samples in minutes, if it runs here."""
    if config.inference.inference_backend != "embedded" or not config.rollout.enable_sampling:
        return None
    return _sampled_in_minutes(
        model_path,
        num_threads=config.inference.inference_threads,
        num_generations=config.data.num_generations,
        num_groups=groups_per_step(config),
    )


def _with_reply_length(
    config: RootConfig,
    model_path: Path,
    limits: _CpuLimits | None,
    before: dict[str, Any],
    notes: list[str],
) -> RootConfig:
    """Return the configuration with replies that fit the servers and the context."""
    default = config.sampling.max_new_tokens
    context = served_context_length(config.inference, model_path) or default + _MIN_REPLY_TOKENS
    length = min(default, context - min(_MIN_REPLY_TOKENS, context // 4))
    reason = f"because the model's context is {context} tokens"
    if limits is not None and limits.max_new_tokens < length:
        length = limits.max_new_tokens
        reason = f"because this CPU samples about {limits.tokens_per_second:.0f} tokens/s"
    length = before.get("max_new_tokens", length)
    return _with_default(config, "sampling", "max_new_tokens", length, reason, notes)


def _with_smaller_steps(
    config: RootConfig, limits: _CpuLimits, before: dict[str, Any], notes: list[str]
) -> RootConfig:
    if not _SETS_STEP_SIZE.isdisjoint(config.trainer.model_fields_set):
        return config
    groups = before.get("groups_per_step", limits.groups_per_step)
    if groups >= groups_per_step(config):
        return config
    reason = f"so that a step is sampled in about {_SAMPLING_SECONDS / 60:.0f} minutes"
    config = _with_default(config, "trainer", "groups_per_step", groups, reason, notes)
    # Rollouts of later steps would share the cores with those that the next step waits for.
    running = groups * config.data.num_generations
    reason = "as many as a step has rollouts"
    return _with_default(config, "inference", "max_running_requests", running, reason, notes)


def _values_of_start(config: RootConfig) -> dict[str, Any]:
    """Return the values with which the run was started, by flag; empty for a new run."""
    path = config.run.output_path / "config.yaml"
    return read_yaml(path) if path.exists() and not config.run.fresh else {}


def _with_default(
    config: RootConfig, section: str, key: str, value: object, reason: str, notes: list[str]
) -> RootConfig:
    """Return the configuration with a value for a flag that was not given; add a note if it changes."""
    values = getattr(config, section)
    if key in values.model_fields_set or getattr(values, key) == value:
        return config
    notes.append(f"{SETTINGS[key].typed} {str(value).lower()}, {reason}")
    return config.model_copy(update={section: values.model_copy(update={key: value})})


def _sampled_in_minutes(
    model_path: Path, *, num_threads: int | None, num_generations: int, num_groups: int
) -> _CpuLimits | None:
    """Return the limits for a model; None if its config.json does not give its shape."""
    num_weights = _weights_per_token(model_path)
    if num_weights is None:
        return None
    num_cores = num_threads or len(os.sched_getaffinity(0))
    rate = num_cores * _FLOPS_PER_CORE / (2 * num_weights)
    budget = rate * _SAMPLING_SECONDS
    fitting = int(budget / (num_groups * num_generations))
    length = max(_MIN_CPU_REPLY_TOKENS, 1 << max(0, fitting.bit_length() - 1))
    groups = int(budget / (length * num_generations))
    return _CpuLimits(rate, length, min(num_groups, max(_MIN_GROUPS, groups)))


@dataclass(frozen=True)
class _DecoderSizes:
    """Sizes of a decoder."""

    hidden: int
    layers: int
    vocabulary: int
    kv_share: float
    """Key-value heads per query head."""
    width: int
    """Inner size of the feed-forward parts that a token goes through."""

    @classmethod
    def of(cls, model_path: Path) -> "_DecoderSizes | None":
        """Return the sizes in a model's config.json; None if it does not give them."""
        config = decoder_config(raw_config(model_path))
        hidden, layers, vocabulary, heads = (
            getattr(config, name, None)
            for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
        )
        if not (hidden and layers and vocabulary and heads):
            return None
        experts = getattr(config, "num_experts_per_tok", None)
        inner = getattr(config, "moe_intermediate_size", None) if experts else None
        width = (experts or 1) * (inner or getattr(config, "intermediate_size", None) or 4 * hidden)
        kv_share = (getattr(config, "num_key_value_heads", None) or heads) / heads
        return cls(hidden, layers, vocabulary, kv_share, width)


def _weights_per_token(model_path: Path) -> int | None:
    """Return about how many weights one token is multiplied with; None if the shape is unknown."""
    shape = _DecoderSizes.of(model_path)
    if shape is None:
        return None
    per_layer = shape.hidden**2 * (2 + 2 * shape.kv_share) + 3 * shape.hidden * shape.width
    return int(shape.layers * per_layer + shape.vocabulary * shape.hidden)


def _tokens_in_memory(model_path: Path) -> int:
    """Return the tokens of a forward pass on a CPU: a power of two, equal on similar machines."""
    shape = _DecoderSizes.of(model_path)
    if shape is None:
        return CPU_TOKENS
    # In float32. SmolLM2-135M keeps 1.8 MB a token: about 12 vectors of its hidden size in each layer,
    # and 5 of the inner size.
    kept = 4 * shape.layers * (12 * shape.hidden + 5 * shape.width)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = max(_MIN_CPU_TOKENS, int(memory * _ACTIVATIONS_SHARE / kept))
    return min(CPU_TOKENS, 1 << (fitting.bit_length() - 1))

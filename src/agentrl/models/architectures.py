"""What a model's configuration says about its layers, and which of them we compute exactly."""

from transformers import PretrainedConfig

from agentrl.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose trees are checked to be exact, and that the embedded engine serves."""
FULL_ATTENTION = "full_attention"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Frequencies follow from the longest position of the row, whatever path it is on."""


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Return the kinds of the model's layers, under transformers' names."""
    return set(getattr(config, "layer_types", None) or [FULL_ATTENTION])


def has_window(config: PretrainedConfig) -> bool:
    """Return whether all layers have a sliding window without a kind of their own (Mistral)."""
    return config.model_type == "mistral" and config.sliding_window is not None


def check_tree_support(config: PretrainedConfig) -> None:
    """Refuse architectures whose hidden states do not follow from the token path alone.

    Raises:
        ConfigError: names what is not supported.
    """
    kinds = layer_kinds(config)
    if kinds != {FULL_ATTENTION} or has_window(config):
        raise ConfigError(
            "models with sliding-window or linear-attention layers cannot be trained on token "
            f"trees (layer types {sorted(kinds)}, sliding window "
            f"{getattr(config, 'sliding_window', None)})"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"models with a rotary embedding of type {rope!r} cannot be trained on token trees: it "
            "turns all tokens differently once a sequence is long; yarn, llama3 and linear do not"
        )
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model type {config.model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError("attention_dropout must be 0: policy logprobs have to be reproducible")

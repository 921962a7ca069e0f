"""The architectures that can be trained on token trees, decided from a model's configuration.

A token tree shares the hidden states of a common prefix between all of its continuations. This is
exact only if a token's hidden state follows from the tokens on its path and their positions. A
sliding window, a recurrent state over the row, or a rotary frequency that depends on the row's
length breaks this; such models are refused before weights are read.
"""

from transformers import PretrainedConfig

from agentrl.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose tree gradients the tests compare with separate rows, and that the embedded
engine serves."""
FULL_ATTENTION = "full_attention"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Types whose frequencies depend on the longest position of a row: one long branch would change the
hidden states of all other branches."""


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Return the kinds of the model's layers, by transformers' names."""
    return set(getattr(config, "layer_types", None) or [FULL_ATTENTION])


def has_window(config: PretrainedConfig) -> bool:
    """Return whether all layers have a sliding window that `layer_types` does not list (Mistral)."""
    return config.model_type == "mistral" and config.sliding_window is not None


def check_tree_support(config: PretrainedConfig) -> None:
    """Refuse architectures whose hidden states do not follow from the token path alone.

    Raises:
        ConfigError: the architecture is not supported; the text names the property.
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
            f"models with a rotary embedding of type {rope!r} cannot be trained on token trees: its "
            "frequencies depend on the sequence length; yarn, llama3 and linear are supported"
        )
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model type {config.model_type!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError("attention_dropout must be 0: policy logprobs have to be reproducible")

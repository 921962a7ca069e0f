"""What a model's configuration says before its weights are read: how it can be divided over ranks.

In comes a configuration as transformers reads it, or as `config.json` has it (`raw_config`), so that
commands can refuse a mesh before anything imports torch. Whether a model trains on token trees is not
decided here but tried out (`trainer.learner.merge_trial`).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from agentrl.errors import ConfigError

ROW_CACHED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose keys and values the embedded engine keeps as rows of one tensor."""
FULL_ATTENTION = "full_attention"


class Sizes(Protocol):
    """Sizes of the mesh's dimensions that divide a model."""

    @property
    def tp(self) -> int:
        """Ranks that split heads, hidden units and vocabulary."""
        ...

    @property
    def ep(self) -> int:
        """Ranks that divide the experts."""
        ...

    @property
    def cp(self) -> int:
        """Ranks that divide the tokens of a row."""
        ...


def raw_config(model_path: Path) -> Any:
    """Return what a checkpoint's `config.json` says, as attributes; what it leaves out is absent.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        values = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{model_path / 'config.json'}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{model_path / 'config.json'}: not a JSON object")
    return SimpleNamespace(**{"model_type": None, **values})


def has_plain_layers(config: Any) -> bool:
    """Return whether the embedded engine can keep a model's keys and values as rows of one tensor."""
    kinds = set(getattr(config, "layer_types", None) or [FULL_ATTENTION])
    # Mistral's layers have a window without a kind of their own.
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return config.model_type in ROW_CACHED_MODEL_TYPES and kinds == {FULL_ATTENTION} and not window


def check_parallel_support(config: Any, shape: Sizes) -> None:
    """Refuse meshes into which a model does not go.

    Raises:
        ConfigError: names the flag and the number that it does not divide.
    """
    if getattr(config, "vision_config", None) and max(shape.tp, shape.cp) > 1:
        flag = f"--tp_size {shape.tp}" if shape.tp > 1 else f"--cp_size {shape.cp}"
        raise ConfigError(
            f"{flag}: models that read images ({config.model_type}) are not divided; use 1, and "
            "more ranks shard the weights"
        )
    experts = getattr(config, "num_experts", None)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", heads)
    divided = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
    }
    for name, size in divided.items():
        if size is not None and size % shape.tp:
            raise ConfigError(f"--tp_size {shape.tp} does not divide the model's {name} {size}")
    if shape.ep > 1 and experts is None:
        raise ConfigError(
            f"--ep_size {shape.ep} needs a mixture-of-experts model; {config.model_type} is dense "
            "(use 1)"
        )
    if experts is not None and experts % (shape.ep * shape.tp):
        raise ConfigError(
            f"--ep_size {shape.ep} x --tp_size {shape.tp} does not divide the model's {experts} "
            "experts"
        )
    if heads is None or groups is None:
        return
    # Context parallelism exchanges tokens for heads, so `cp` must divide the query heads of a `tp`
    # rank. Key-value heads may be fewer than `cp`; each is then repeated on several ranks.
    held = groups // shape.tp
    if heads // shape.tp % shape.cp or (held % shape.cp and shape.cp % held):
        raise ConfigError(
            f"--cp_size {shape.cp} does not divide the model's {heads} query heads ({groups} "
            f"key-value heads) / --tp_size {shape.tp}"
        )

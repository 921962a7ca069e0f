"""What an adapter's directory says about it. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterShape:
    """What an adapter looks like."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    """Last names of the linear layers of the decoder blocks that it changes."""
    base: str
    """Name or directory of the base model, for whoever loads the adapter."""


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter, and not all weights of a model."""
    return (path / CONFIG_FILE).is_file()


def read_shape(path: Path) -> AdapterShape:
    """Return what the adapter in a directory looks like.

    Raises:
        ConfigError: there is none that this can be said of.
    """
    try:
        config = json.loads((path / CONFIG_FILE).read_text())
        return AdapterShape(
            rank=int(config["r"]),
            alpha=int(config["lora_alpha"]),
            target_modules=tuple(sorted(config["target_modules"])),
            base=str(config["base_model_name_or_path"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no LoRA adapter at {path}: {error}") from error

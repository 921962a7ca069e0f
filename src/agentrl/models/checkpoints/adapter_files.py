"""The configuration of a LoRA adapter, read from its directory.

Input: a directory in PEFT's format. Output: an `AdapterShape`. Samplers and the launcher import
this module, so it must not import torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterShape:
    """Rank, scale and targets of an adapter."""

    rank: int
    alpha: int
    """The update is scaled by `alpha / rank`."""
    target_modules: tuple[str, ...]
    """Last name components of the linear layers in the decoder blocks that it changes."""
    base: str
    """Name or directory of the base model; inference servers read it when they load the adapter."""


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter rather than all weights of a model."""
    return (path / CONFIG_FILE).is_file()


def read_shape(path: Path) -> AdapterShape:
    """Read the shape of the adapter in a directory."""
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

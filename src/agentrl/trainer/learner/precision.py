"""Which precision weights are kept in, and which they are used in.

Small steps vanish when they are added to bfloat16 weights, so these are only ever a copy: master
weights and optimizer state are float32, forward and backward run in bfloat16.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from agentrl.distributed import Ranks

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """Data types of one training."""

    master: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device) -> Self:
        """Return what `--torch_dtype` means on a device; `auto` is bfloat16 on CUDA."""
        if name == "auto":
            name = "bfloat16" if device.type == "cuda" else "float32"
        compute = _DTYPES[name]
        return cls(torch.float32 if compute == torch.bfloat16 else compute, compute)

    @property
    def is_mixed(self) -> bool:
        """Whether the two differ."""
        return self.master != self.compute

    def autocast(self, ranks: Ranks) -> torch.autocast:
        """Return the context for forward passes.

        Sharded models need none: FSDP2 gathers their parameters in compute precision.
        """
        return torch.autocast(
            ranks.device.type,
            dtype=self.compute if self.is_mixed else torch.bfloat16,
            enabled=self.is_mixed and ranks.world_size == 1,
        )


def set_config_dtype(model_dir: Path, dtype: torch.dtype) -> None:
    """Name the precision of the weight files in config.json, where inference servers look."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    staging = model_dir / ".config.json.tmp"
    staging.write_text(json.dumps(config, indent=2) + "\n")
    staging.replace(path)

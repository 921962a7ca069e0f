"""The settings of a learner: weights, precision, and its sections of the configuration.

Rank 0 resolves and checks them; every rank receives the same.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.distributed import Ranks
from agentrl.distributed.dtypes import dtype_named
from agentrl.models.checkpoints.adapter_files import AdapterShape
from agentrl.models.checkpoints.architectures import raw_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class StartWeights:
    """The weights that every rank loads."""

    model_path: Path
    """Hugging Face directory; with an adapter, the one of the base model."""
    adapter_path: Path | None = None
    """Directory of the adapter to resume."""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Settings that are equal on all ranks; rank 0 broadcasts them."""

    weights: StartWeights
    """Initial weights; the model's tokenizer files are copied into every export."""
    model: ModelSection
    trainer: TrainerSection
    algorithm: AlgorithmSection | None
    """Loss settings; None: cross-entropy, the loss of supervised fine-tuning."""
    seed: int
    """Seed of all randomness in training."""
    reference_path: Path | None = None
    """Reference model of the KL penalty. None with a KL penalty: the policy has an adapter, and its
    base model is the reference."""
    keeps_dtype: bool = False
    """Export all weights in the precision of the model that training starts from, unless
    `--torch_dtype` names another; otherwise in compute precision."""
    starts_in_host_memory: bool = False
    """Load into host memory; `Learner.move` brings the state to the device."""


def export_dtype(settings: LearnerSettings, compute: torch.dtype) -> torch.dtype:
    """Return the precision of exported weights; see `LearnerSettings.keeps_dtype`."""
    if not settings.keeps_dtype or settings.model.torch_dtype != "auto":
        return compute
    config = vars(raw_config(settings.weights.model_path))
    stored = dtype_named(str(config.get("dtype") or config.get("torch_dtype")))
    return compute if stored is None else stored


def adapter_shape(model: ModelSection) -> AdapterShape | None:
    """Return the shape of the adapter from the flags, or None if all weights are trained."""
    if not model.lora_rank:
        return None
    base = Path(model.model_name_or_path).expanduser()
    return AdapterShape(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.lora_target_modules,
        base=str(base.absolute()) if base.is_dir() else model.model_name_or_path,
    )


@dataclass(frozen=True)
class Precision:
    """Data types of a training run.

    bfloat16 has 8 bits of precision, so a typical update is rounded away when it is added to a
    bfloat16 weight. Master weights and optimizer state are therefore float32; forward and backward
    passes use a bfloat16 copy.
    """

    master: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device) -> Self:
        """Return the data types of `--torch_dtype` on a device.

        `auto` is bfloat16 on CUDA and float32 elsewhere.
        """
        if name == "auto":
            name = "bfloat16" if device.type == "cuda" else "float32"
        compute = _DTYPES[name]
        return cls(torch.float32 if compute == torch.bfloat16 else compute, compute)

    @property
    def is_mixed(self) -> bool:
        """Whether the two differ."""
        return self.master != self.compute

    def autocast(self, ranks: Ranks) -> torch.autocast:
        """Return the autocast context of forward passes.

        It is disabled for sharded models: FSDP2 gathers their parameters in compute precision.
        """
        return torch.autocast(
            ranks.device.type,
            dtype=self.compute if self.is_mixed else torch.bfloat16,
            enabled=self.is_mixed and ranks.world_size == 1,
        )

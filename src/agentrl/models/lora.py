"""Low-rank adapters (Hu et al., arXiv 2106.09685) on a frozen policy, through PEFT.

A linear layer W of the decoder blocks computes W x + (alpha / rank) * B (A x); only A [rank, in]
and B [out, rank] are trained. Both act on each token independently, so token trees, chunks and rows
split over ranks remain exact. There is no dropout: policy logprobs must be reproducible.

Adapters are stored in PEFT's format: `adapter_config.json`, which names the base model, and
`adapter_model.safetensors`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from agentrl.distributed import Stages, load_full_state_dict, whole_tensors
from agentrl.errors import ConfigError
from agentrl.models.checkpoint_export import atomic_weights_directory, read_tokenizer_files
from agentrl.models.checkpoints.adapter_files import WEIGHTS_FILE, AdapterShape
from agentrl.models.checkpoints.architectures import raw_config
from agentrl.models.policy import PolicyModel, TargetLogprobs
from agentrl.models.vision.image_encoders import model_class

BASE = "base_layer"
"""PEFT's attribute for the linear layer below an adapter."""
_NAME = "default"
"""PEFT's name for a single adapter; part of the parameters' names."""
_WRAPPER_PREFIX = "model."
_PEFT_PREFIX = "base_model.model."


def add_adapter(model: PreTrainedModel, shape: AdapterShape, *, dtype: torch.dtype) -> None:
    """Freeze a model and add an adapter with uninitialized values (in place)."""
    # Imported here: the import takes a second, and only runs with adapters need it.
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415

    _check_targets(model, shape.target_modules)
    model.requires_grad_(requires_grad=False)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=list(shape.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=shape.base,
        # Written into the exported configuration for servers; training is enabled below.
        inference_mode=True,
    )
    is_meta = next(model.parameters()).is_meta
    inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=is_meta)
    for module in _adapted_modules(model):
        for part in (module.lora_A, module.lora_B):
            part.to(dtype).requires_grad_(requires_grad=True)


def has_adapter(policy: PolicyModel) -> bool:
    """Return whether `add_adapter` was called for a policy's model."""
    return hasattr(policy.model, "peft_config")


def adapter_parts(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of A and B within a module, or None if it has no adapter."""
    return (f"lora_A.{_NAME}", f"lora_B.{_NAME}") if hasattr(module, "lora_A") else None


def start_adapter(policy: PolicyModel, seed: int) -> None:
    """Draw A as PEFT does and set B to 0, so that the policy equals its base.

    Every rank draws whole tensors, each from the seed and its name, and keeps its shard of them.
    """
    tensors = {}
    for name, parameter in _adapter_parameters(policy):
        tensor = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(seed + crc32(name.encode()))
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        tensors[name] = tensor
    load_full_state_dict(policy, tensors)


def adapter_tensors(policy: PolicyModel, stages: Stages | None = None) -> dict[str, torch.Tensor]:
    """Gather the adapter's full tensors by PEFT's names (collective).

    Args:
        policy: sharded or not.
        stages: of the pipeline that the policy is a stage of; the tensors are then on rank 0 only.
    """
    parts = {name: parameter.detach() for name, parameter in _adapter_parameters(policy)}
    return {_peft_name(name): tensor for name, tensor in whole_tensors(parts, stages)}


def save_adapter(
    policy: PolicyModel, path: Path, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype
) -> Path:
    """Write an adapter as PEFT does; `path` appears complete or not at all.

    Args:
        policy: source of the adapter's configuration.
        path: directory to create; an existing one is replaced.
        tensors: the result of `adapter_tensors`.
        dtype: precision in the file.

    Returns:
        The directory.
    """
    peft_config: Any = policy.model.peft_config
    with atomic_weights_directory(path) as partial:
        peft_config[_NAME].save_pretrained(partial)
        contents = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
        save_file(contents, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    return path


def load_adapter(policy: PolicyModel, path: Path) -> None:
    """Load a policy's adapter from a directory; every rank reads the same files."""
    try:
        tensors = load_file(path / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load the adapter {path}: {error}") from error
    wanted = {
        _peft_name(name): (name, parameter) for name, parameter in _adapter_parameters(policy)
    }
    tensors = {
        name: part
        for name, part in tensors.items()
        if policy.stage.has(name.removeprefix(_PEFT_PREFIX))
    }
    if wanted.keys() != tensors.keys():
        name = sorted(wanted.keys() ^ tensors.keys())[0]
        raise ConfigError(
            f"the layers of the adapter {path} differ from --lora_target_modules: {name}"
        )
    for peft_name, (_, parameter) in wanted.items():
        if parameter.shape != tensors[peft_name].shape:
            raise ConfigError(
                f"the adapter {path} does not match --lora_rank: {peft_name} has shape "
                f"{list(tensors[peft_name].shape)} instead of {list(parameter.shape)}"
            )
    load_full_state_dict(
        policy, {name: tensors[peft_name].to(p.dtype) for peft_name, (name, p) in wanted.items()}
    )


@contextmanager
def without_adapter(policy: PolicyModel) -> Iterator[None]:
    """Disable a policy's adapter within the block; for forward passes without gradients."""
    modules = _adapted_modules(policy)
    for module in modules:
        # PEFT's public switch also changes `requires_grad`; FSDP2 reads that once, at sharding.
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in modules:
            module._disable_adapters = False


class BasePolicy(nn.Module):
    """A policy without its adapter, as a module with the same interface; shares all weights.

    Serves as the reference policy of a run with adapters.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *arguments: Any, **options: Any) -> TargetLogprobs:
        """See `PolicyModel.forward`."""
        with without_adapter(self.policy):
            output: TargetLogprobs = self.policy(*arguments, **options)
            return output


def merge_adapter(adapter: Path, base: Path, target: Path) -> Path:
    """Write a checkpoint with the adapter merged into the weights: W + (alpha / rank) * B A.

    The sum is computed in float32 and rounded once, to the precision of the base model's files.

    Args:
        adapter: directory of the adapter.
        base: Hugging Face directory of its base model.
        target: directory to create; it appears complete or not at all.

    Returns:
        The directory.
    """
    from peft import PeftModel  # noqa: PLC0415

    config = AutoConfig.from_pretrained(base)
    raw_config(base)
    dtype = config.dtype or torch.float32
    model = model_class(config).from_pretrained(base, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with atomic_weights_directory(target) as partial:
        merged.to(dtype).save_pretrained(partial)
        for name, content in read_tokenizer_files(base).items():
            (partial / name).write_bytes(content)
    return target


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters except the adapter's, by the names they have without an adapter."""
    for name, parameter in model.named_parameters():
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(f".{BASE}.", "."), parameter


def _check_targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> None:
    known = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(
            f"--lora_target_modules {','.join(unknown)}: the model's decoder blocks have no such "
            f"linear layer; choose from {','.join(sorted(known))}"
        )


def _adapted_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _adapter_parameters(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in policy.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield name, parameter


def _peft_name(name: str) -> str:
    return _PEFT_PREFIX + name.removeprefix(_WRAPPER_PREFIX).replace(f".{_NAME}.", ".")

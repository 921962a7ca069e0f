"""Load a policy from a Hugging Face checkpoint.

Input: a directory. Output: a `PolicyModel`. Weights are always read from files: a missing tensor is
an error, never a random initialization. Each rank allocates only its own shards (see `weights`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import (
    TREE_ATTENTION,
    check_device,
    check_images,
    own_attention,
    set_attention,
)
from agentrl.models.checkpoints.architectures import raw_config
from agentrl.models.policy import PolicyModel
from agentrl.models.recurrent.recurrent_layers import follow_paths
from agentrl.models.unrounded import unrounded_recomputation
from agentrl.models.vision.image_encoders import model_class
from agentrl.models.weights import materialize, read_weights

_EXPERTS = "agentrl_grouped"
"""Our name in transformers' registry of implementations of experts."""


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str | None = TREE_ATTENTION,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    prepare: Callable[[PolicyModel], object] | None = None,
    cpu_offload: bool = False,
) -> PolicyModel:
    """Load configuration and weights.

    Args:
        path: directory of a checkpoint.
        dtype: precision of parameters and computation. With float64, the whole model computes in
            float64.
        device: where the model computes.
        attention: a back end's `implementation` (see `models.attention`); None: the model's own.
        trust_remote_code: run Python code from the checkpoint.
        gradient_checkpointing: recompute activations in the backward pass.
        prepare: changes the model in place while its parameters have no memory: splits and shards
            it over ranks, makes its routers replay, or adds an adapter, whose values the caller sets
            later.
        cpu_offload: keep the parameters in host memory; `prepare` must shard them accordingly.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    if attention is not None:
        check_device(attention, torch.device(device))
        check_images(attention, config)
    # On the meta device even under a fake mode: torch allocates memory for meta tensors only.
    with unset_fake_temporarily():
        policy = wrap_policy(
            _without_weights(Path(path), config, dtype, attention, trust_remote_code),
            gradient_checkpointing=gradient_checkpointing,
        )
        if prepare is not None:
            prepare(policy)
    compute_device = torch.device(device)
    materialize(
        policy,
        compute_device,
        parameter_device=torch.device("cpu") if cpu_offload else compute_device,
    )
    if not any(map(is_fake, policy.parameters())):  # tensors without memory hold no values
        read_weights(policy.model, Path(path), has=policy.stage.has)
    return policy


def _without_weights(
    path: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Build the model with parameters on the meta device and real buffers.

    Buffers (rotary frequencies) are computed at construction and are not in the files.
    """
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = model_class(config).from_config(
            config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    set_attention(model, own_attention(model) if attention is None else attention)
    model.tie_weights()
    if (path / "generation_config.json").is_file():
        # `save_pretrained` writes it with every export, and servers read their stop tokens from it.
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def read_config(path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a checkpoint's configuration."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no model configuration at {path}: {_first_line(error)}") from error
    raw_config(Path(path))
    return config


def wrap_policy(model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> PolicyModel:
    """Wrap a transformers model as a trainable policy.

    Dropout and router noise are off, because policy logprobs must be reproducible: only layers that
    recompute their activations are in training mode.
    """
    # transformers computes experts with torch's grouped matrix products, which lack float64.
    model.set_experts_implementation("eager" if model.dtype == torch.float64 else _EXPERTS)
    follow_paths(model)
    model.get_input_embeddings().register_forward_hook(_in_autocast_precision)
    if gradient_checkpointing:
        # transformers renamed the method in its 5.x series.
        enable: Any = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        recomputation = (
            {"context_fn": unrounded_recomputation} if model.dtype == torch.float64 else {}
        )
        enable({"use_reentrant": False} | recomputation)
    policy = PolicyModel(model).eval()
    for module in model.modules():
        module.training = isinstance(module, GradientCheckpointingLayer)
    return policy


def _in_autocast_precision(
    module: nn.Module, arguments: tuple[Any, ...], embeddings: torch.Tensor
) -> torch.Tensor:
    """Start the residual stream in autocast's precision.

    Autocast leaves the output of the embedding in float32. Gradient checkpointing would then keep
    twice the memory per layer, and results on one GPU would differ from those on several, where
    FSDP2's mixed precision casts the weights of the embedding as well.
    """
    device = embeddings.device.type
    if torch.is_autocast_enabled(device):
        return embeddings.to(torch.get_autocast_dtype(device))
    return embeddings


def _experts_in_autocast_precision(
    experts: nn.Module,
    hidden_states: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute experts by grouped matrix products, in autocast's precision.

    Autocast does not cover these products. transformers gives them inputs in the precision of the
    weights, and float32 products take many times as long on a GPU.
    """
    device = hidden_states.device.type
    weights: Any = experts
    if torch.is_autocast_enabled(device):
        weights = _CastParameters(experts, torch.get_autocast_dtype(device))
    output: torch.Tensor = grouped_mm_experts_forward(
        weights, hidden_states, chosen, routing_weights
    )
    return output


class _CastParameters:
    """A module whose parameters are read in another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


ExpertsInterface.register(_EXPERTS, _experts_in_autocast_precision)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

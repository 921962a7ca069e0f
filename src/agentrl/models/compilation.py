"""Compiles a policy's layers.

Norms, rotary embedding, gates, residual sums and the softmax over the vocabulary are many small
kernels, each of which reads and writes all tokens; torch's compiler fuses them, and calls a layer's
kernels without Python between them. A layer contains its attention where the back end can be traced
(see `models.attention.backend`); recurrent layers, which follow a row's tree, stay as they are.
Kernels are compiled for every length at once, and gradients differ from those without compilation by
rounding only.
"""

import os
import shutil
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError
from agentrl.models.policy import PolicyModel
from agentrl.runtime.installation import user_cache

_COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang"))}
"""Type of device -> the variable that names the compiler that torch or Triton calls, and the names
that they try without it."""


LEAST_STEPS = 100
"""Steps from which compiling repays itself: it takes about half a minute."""


def compiles_layers(trainer: TrainerSection, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a run compiles its layers: as told, else on GPUs where it repays itself."""
    if trainer.torch_compile is not None:
        return trainer.torch_compile
    return (
        device.type == "cuda"
        and trainer.max_steps >= LEAST_STEPS
        and trainer.tp_size == 1  # torch cannot compile layers that tensor parallelism splits
        and dtype != torch.float64  # compiled kernels round where a modeling file does
        and not trainer.full_determinism
        and _missing_compiler(device) is None
    )


def compile_policy(policy: PolicyModel, device: torch.device) -> None:
    """Compile a policy's layers, and the scores of its head.

    Compilation takes place in the first passes. Kernels are kept in the user's cache, which later runs
    read; torch's own choice, a folder in /tmp with a known name, could be another user's.

    Args:
        policy: with all hooks and shards in place; tensor parallelism does not split it.
        device: where it computes.
    """
    missing = _missing_compiler(device)
    if missing is not None:
        raise ConfigError(f"--torch_compile true needs a compiler, and {missing}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache("torch_compile")))
    windows = {None}
    for layer in policy.model.get_decoder().modules():
        windows.add(getattr(layer, "sliding_window", None))
        if isinstance(layer, GradientCheckpointingLayer):
            _compile_layer(layer)
    policy.traced_windows = tuple(windows)
    policy.score_logits = torch.compile(policy.score_logits, dynamic=True)


def _compile_layer(layer: GradientCheckpointingLayer) -> None:
    """Compile a layer's forward pass; recomputation and the hooks of shards stay around it."""
    recompute: Any = layer._gradient_checkpointing_func if layer.gradient_checkpointing else None
    layer.gradient_checkpointing = False  # would be within the compiled function
    compiled = torch.compile(layer.forward, dynamic=True)

    def recomputed(*arguments: Any, **keywords: Any) -> Any:
        return recompute(partial(compiled, **keywords), *arguments)

    layer.forward = compiled if recompute is None else recomputed


def _missing_compiler(device: torch.device) -> str | None:
    """Return what a machine without a compiler lacks, and what to do; None: there is one."""
    variable, names = _COMPILERS[device.type]
    if variable in os.environ:
        names = (os.environ[variable],)
    if any(map(shutil.which, names)):
        return None
    return (
        f"there is no {' or '.join(names)}; install it, set {variable} to another, or give "
        "--torch_compile false"
    )

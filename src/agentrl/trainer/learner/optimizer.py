"""AdamW and its learning-rate schedule from the trainer's flags, and moving their state."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from agentrl.algorithms.formula_registry import users_function
from agentrl.config.optimizer_arguments import parse_optim_args
from agentrl.config.own_function import is_reference
from agentrl.config.sections import TrainerSection
from agentrl.distributed.host_memory import HostMemory, synchronize


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: TrainerSection, device: torch.device
) -> AdamW:
    """Return AdamW over `parameters`; on a GPU, one kernel updates many of them."""
    arguments = parse_optim_args(config.optim_args)
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        weight_decay=config.weight_decay,
        # Never all at once as `foreach` does, which takes another copy of all weights.
        foreach=False,
        fused=device.type == "cuda" and not config.cpu_offload,
    )


def learning_rate(config: TrainerSection, num_done: int) -> float:
    """Return the learning rate of the step after `num_done` steps.

    A pure function of the step, so a checkpoint needs no scheduler state.
    """
    if is_reference(config.lr_scheduler_type):
        return float(users_function(config.lr_scheduler_type, "--lr_scheduler_type")(num_done + 1))
    if num_done < config.warmup_steps:
        return config.learning_rate * (num_done + 1) / (config.warmup_steps + 1)
    num_after_warmup = max(1, config.max_steps - config.warmup_steps)
    progress = min(1.0, (num_done - config.warmup_steps) / num_after_warmup)
    return config.learning_rate * _SCHEDULES[config.lr_scheduler_type](progress)


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
}
"""Share of the peak after the warm-up, by the share of the steps that is done."""


def move_state(
    models: Iterable[nn.Module], optimizer: Optimizer, device: torch.device, memory: HostMemory
) -> None:
    """Move parameters, buffers and the optimizer's state (`--colocated`).

    Moving to the current device is free. Parameters remain the same objects, tied ones included, so
    the optimizer's references stay valid. The copies run one after the other without this process,
    which waits once, at the end.
    """
    left: list[torch.Tensor] = []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == device.type:
            return tensor
        if device.type == "cpu":
            return memory.copy_of(tensor)
        left.append(tensor.detach())
        return tensor.to(device, non_blocking=True)

    for model in models:
        model._apply(moved)  # as `Module.to` does, and what sharded models extend
    # Unless it is fused, AdamW keeps its step counts in host memory, whatever the parameters' device.
    keeps_counts = not any(group.get("fused") for group in optimizer.param_groups)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not (name == "step" and keeps_counts):
                state[name] = moved(value)
    synchronize()
    memory.give_back(left)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()

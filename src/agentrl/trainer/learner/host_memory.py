"""The trainer's state between the device and host memory, for `--colocated`."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer


def move_state(models: Iterable[nn.Module], optimizer: Optimizer, device: torch.device) -> None:
    """Move parameters, buffers and the optimizer's state; to where they are already is free.

    Parameters stay the same objects, tied ones tied, so that the optimizer goes on with them.
    """
    for model in models:
        model.to(device)
    for state in optimizer.state.values():
        for name, value in state.items():
            # AdamW counts its steps in host memory, wherever the parameters are.
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(device)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()

"""Activation offloading: values saved for the backward pass are kept in host memory.

Provides a context for forward passes. Values are copied bit by bit, so gradients are the same with
and without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

HOST = torch.device("cpu")
_SMALLEST_BYTES = 1024
"""Smaller copies cost more time than the memory they save is worth."""


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """An offloaded tensor, or one rank's part of it."""

    values: torch.Tensor
    device: torch.device
    layout: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None


@contextmanager
def activations_in_host_memory() -> Iterator[None]:
    """Copy values saved for the backward pass to the host, and back when they are used."""
    with saved_tensors_hooks(_to_host, _to_device):
        yield


def _to_host(tensor: torch.Tensor) -> torch.Tensor | _Offloaded:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or tensor.nbytes < _SMALLEST_BYTES:
        return tensor  # weights stay on the device, saved or not
    layout = None
    local = tensor
    if isinstance(tensor, DTensor):
        layout = (tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())
        local = tensor.to_local()
    return _Offloaded(local.detach().to(HOST, copy=True), local.device, layout)


def _to_device(saved: torch.Tensor | _Offloaded) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    values = saved.values.to(saved.device)
    if saved.layout is None:
        return values
    mesh, placements, size, stride = saved.layout
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=size, stride=stride)

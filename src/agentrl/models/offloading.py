"""Activation offloading: values saved for the backward pass are kept in host memory.

Provides a context for forward passes, and the device of what passes between the chunks of a row.
Values are copied bit by bit, so gradients are the same with and without it.
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
_MOST_GAPS = 2
"""A tensor that is spread over more than this multiple of its elements comes back contiguous."""


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """An offloaded tensor, or one rank's part of it."""

    values: torch.Tensor
    """In host memory; dimensions along which the tensor repeats itself have length 1."""
    strides: tuple[int, ...]
    """Of the values on the device. Kernels rely on them: padded rows of a mask are aligned."""
    size: torch.Size
    device: torch.device
    layout: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None


def chunk_states_device(activation_offloading: bool) -> torch.device | None:
    """Return where what passes between chunks is kept; None: where it is computed."""
    return HOST if activation_offloading else None


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
    size, values = local.size(), local.detach()
    for dimension, stride in enumerate(values.stride()):
        if stride == 0:
            values = values.narrow(dimension, 0, 1)
    strides = values.stride()
    if _extent(values) > _MOST_GAPS * values.numel():
        strides = torch.empty(values.size(), device="meta").stride()
    return _Offloaded(values.to(HOST, copy=True), strides, size, local.device, layout)


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements between a tensor's first and last, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))


def _to_device(saved: torch.Tensor | _Offloaded) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    values = torch.empty_strided(
        saved.values.size(), saved.strides, dtype=saved.values.dtype, device=saved.device
    )
    values = values.copy_(saved.values).expand(saved.size)
    if saved.layout is None:
        return values
    mesh, placements, size, stride = saved.layout
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=size, stride=stride)

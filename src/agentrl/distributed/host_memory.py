"""Host memory for copies of a GPU's tensors: page-locked, and kept for the copies that follow.

Memory that is new has to be mapped page by page, and a copy into memory that is not locked goes
through a buffer of the driver's and blocks the caller. What is kept costs host memory, as many bytes
as the most that was copied at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

_SLAB_BYTES = 1 << 28
"""Torch rounds locked memory up to a power of two, so that small tensors share an allocation."""
_ALIGNMENT = 512


class HostMemory:
    """Lends memory for copies, and takes it back."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[torch.Tensor]]
        self._free = defaultdict(list)
        self._lent: set[int] = set()
        self._slab = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy in host memory, which is complete after `synchronize`.

        A tensor that is there already is returned as it is. Shards of a mesh and views with gaps
        are copied at once, into memory of their own.
        """
        if tensor.device.type == "cpu":
            return tensor
        if isinstance(tensor, DTensor) or not (tensor.is_contiguous() and tensor.numel()):
            return tensor.to("cpu")
        free = self._free[tensor.shape, tensor.dtype]
        memory = free.pop() if free else self._allocated(tensor)
        self._lent.add(memory.data_ptr())
        return memory.copy_(tensor.detach(), non_blocking=True)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take back the memory of copies that nobody reads any more; others are left alone."""
        for tensor in tensors:
            if tensor.data_ptr() in self._lent:
                self._lent.remove(tensor.data_ptr())
                self._free[tensor.shape, tensor.dtype].append(tensor)

    @contextmanager
    def copies(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield complete copies in host memory, which is taken back at the end."""
        copies = {name: self.copy_of(tensor) for name, tensor in tensors.items()}
        synchronize()
        try:
            yield copies
        finally:
            self.give_back(copies.values())

    def _allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes >= _SLAB_BYTES:
            return _locked(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if tensor.nbytes > len(self._slab):
            self._slab = _locked(_SLAB_BYTES)
        memory = self._slab[: tensor.nbytes]
        self._slab = self._slab[-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(tensor.dtype).view(tensor.shape)


def synchronize() -> None:
    """Wait for the copies that have begun."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _locked(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

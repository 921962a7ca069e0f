"""Observers of a rehearsal: live memory, and where Python waits for the device.

Both see every operation on fake tensors, whose storages have sizes but no memory and no values:
reading a value yields ones.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.distributed.dtypes import dtype_name

_BLOCK_BYTES = 512
"""CUDA's allocator returns whole blocks."""
_READERS: dict[str, Callable[[Any], object]] = {
    "item": np.ndarray.item,
    "tolist": np.ndarray.tolist,
    "numpy": lambda values: values,
    "__float__": float,
    "__int__": int,
    "__bool__": bool,
    "__index__": int,
}
_PACKAGE = Path(__file__).parents[3]


@dataclass(eq=False)
class _Block:
    """The memory of one storage."""

    device: str
    size: int = 0


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages created within the block (a context manager)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its signature out
        self.live: Counter[str] = Counter()
        """Bytes by type of device."""
        self.peak: Counter[str] = Counter()
        """Peak since the last call of `restart`."""
        self.made = 0
        """Bytes of all storages created, alive or not."""
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, _Block] = (
            weakref.WeakKeyDictionary()
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 empties and refills the storages of gathered parameters.
            result = resize(storage, size)
            if storage in self._blocks:
                self._resize(self._blocks[storage], size)
            return result

        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = Counter(self.live)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the call is repeated with local tensors
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._track(leaf)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        device, storage = tensor.device.type, tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor) or storage in self._blocks:
            return
        block = _Block(device)
        self._blocks[storage] = block
        self._resize(block, storage.nbytes())
        self.made += block.size
        weakref.finalize(storage, self._resize, block, 0).atexit = False

    def _resize(self, block: _Block, size: int) -> None:
        change = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES - block.size
        block.size += change
        self.live[block.device] += change
        self.peak[block.device] = max(self.peak[block.device], self.live[block.device])


class HostReads(TorchFunctionMode):
    """Answers and counts reads of fake tensors' values within the block (a context manager)."""

    def __init__(self, device: torch.device) -> None:
        """Start without any places."""
        super().__init__()
        self.places: Counter[str] = Counter()
        """`file.py:function` of this package -> number of times."""
        self._device = device.type

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if not isinstance(tensor, FakeTensor):
            return function(*args, **kwargs)
        read = _READERS.get(getattr(function, "__name__", ""))
        if read is not None:
            if tensor.device.type == self._device:
                self._count_place()
            return read(_ones(tensor))
        result = function(*args, **kwargs)
        is_on_host = isinstance(result, FakeTensor) and result.device.type == "cpu"
        if is_on_host and tensor.device.type == self._device != "cpu":
            self._count_place()
        return result

    def _count_place(self) -> None:
        for frame, _ in traceback.walk_stack(sys._getframe()):
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(_PACKAGE) and path.parent != Path(__file__).parent:
                name = frame.f_code.co_name
                self.places[f"{path.relative_to(_PACKAGE).as_posix()}:{name}"] += 1
                return


def _ones(tensor: torch.Tensor) -> np.ndarray:
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return np.ones(tuple(tensor.shape), dtype=dtype_name(dtype))

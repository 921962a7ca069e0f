"""Keeps float64 models in float64, even if a modeling file casts to float32.

Norms, routers, rotary angles and scans of most families compute in float32, whatever the model's
precision. That is right for bfloat16, but hides training errors below 1e-8 that a float64 model
should reveal.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def unrounded(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return the context for a model of this precision; float64 is never rounded in it."""
    return _Unrounded() if dtype == torch.float64 else nullcontext()


def unrounded_recomputation() -> tuple[
    AbstractContextManager[object], AbstractContextManager[object]
]:
    """Return contexts of a layer's forward pass and of its recomputation, for `checkpoint`."""
    return nullcontext(), _Unrounded()


class _Unrounded(TorchFunctionMode):
    """Reads float32 as float64 in the arguments of torch's functions."""

    def __enter__(self) -> "_Unrounded":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        # Called for every operation: unchanged values are not copied.
        if any(argument is torch.float32 for argument in args):
            args = tuple(map(_widened, args))
        if kwargs and any(argument is torch.float32 for argument in kwargs.values()):
            kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
        return function(*args, **(kwargs or {}))


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument

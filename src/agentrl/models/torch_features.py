"""What the installed PyTorch lacks of the newest supported one, decided by signature, not version."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


@cache
def has_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function of PyTorch takes a keyword; 2.11 lacks some that 2.13 has."""
    return name in inspect.signature(function).parameters


def with_recompile_limit(function: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Return a compiled function that may have `limit` variants.

    For a `torch.compile` without the keyword, whose limit is the process's: it is raised for each
    call, which includes the compilation.
    """

    @wraps(function)
    def limited(*arguments: Any, **keywords: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=limit):
            return function(*arguments, **keywords)

    return limited

"""Precisions by name, as checkpoints and servers write them: `bfloat16` for `torch.bfloat16`."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a name; None if there is none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None

"""The registered attention back ends. A new one is a module in this folder and an entry in `BACKENDS`.

The model's loader selects a back end by name; the forward pass asks here for the keywords that carry
a row's layout to the layers.
"""

from typing import Any

import torch

from agentrl.data.rows import PackedRow
from agentrl.errors import ConfigError
from agentrl.models.attention.backend import CONTEXT, AttentionBackend, ChunkStates, RowContext
from agentrl.models.attention.flex import FLEX
from agentrl.models.attention.layout import visibility
from agentrl.models.attention.sdpa import SDPA
from agentrl.models.attention.varlen import VARLEN
from agentrl.models.row_split import RowShare

BACKENDS: tuple[AttentionBackend, ...] = (SDPA, FLEX, VARLEN)
"""The first is the default."""
TREE_ATTENTION = SDPA.implementation
ORACLE = "sdpa"
"""transformers' SDPA with a dense mask, the reference in tests. (transformers' eager attention adds
the mask to the scores; a bool mask gives silently wrong results, so it is not an option.)"""

_BY_FLAG = {backend.flag: backend for backend in BACKENDS}
_BY_IMPLEMENTATION = {backend.implementation: backend for backend in BACKENDS}


def implementation_of(flag: str) -> str:
    """Return transformers' name of a value of `--attention_implementation`."""
    return _BY_FLAG[flag].implementation


def check_device(implementation: str, device: torch.device) -> None:
    """Check that a back end can train on a device.

    Raises:
        ConfigError: it cannot; the text names one that can.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    refusal = None if backend is None else backend.refusal(device)
    if backend is not None and refusal is not None:
        raise ConfigError(
            f"--attention_implementation {backend.flag} {refusal}; use {SDPA.flag}, which computes the "
            "same on every device"
        )


def layer_keywords(
    implementation: str,
    row: PackedRow,
    device: torch.device,
    share: RowShare,
    states: ChunkStates | None = None,
    num_above: int = 0,
) -> dict[str, Any]:
    """Return the keywords of a model's forward pass that describe a row to its layers.

    Args:
        implementation: transformers' name of the model's attention.
        row: N tokens in depth-first preorder.
        device: where the model computes.
        share: this rank's part of the row.
        states: keys and values shared with earlier chunks; None for a whole row.
        num_above: tokens above the row, whose keys and values are in `states`.

    Raises:
        ConfigError: the row is a chunk; `ORACLE` computes whole rows only.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    if backend is not None:
        return {CONTEXT: RowContext(share, backend.layout(row, device, num_above), states)}
    if states is not None:
        raise ConfigError(f"rows in chunks need tree attention, not {implementation}")
    return {"attention_mask": torch.from_numpy(visibility(row)).to(device)[None, None]}

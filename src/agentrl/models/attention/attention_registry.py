"""The attention back ends that there are. A further one is a module and a line here."""

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
"""transformers' own SDPA, which is given a dense mask: what back ends are checked against. (Its eager
attention is silently wrong with a bool mask, and is not offered.)"""

_BY_FLAG = {backend.flag: backend for backend in BACKENDS}
_BY_IMPLEMENTATION = {backend.implementation: backend for backend in BACKENDS}


def implementation_of(flag: str) -> str:
    """Return the name in transformers of what `--attention_implementation` asks for."""
    return _BY_FLAG[flag].implementation


def check_device(implementation: str, device: torch.device) -> None:
    """Refuse to train on a device that a back end is not for.

    Raises:
        ConfigError: says which one is.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    refusal = None if backend is None else backend.refusal(device)
    if backend is not None and refusal is not None:
        raise ConfigError(
            f"--attention_implementation {backend.flag} {refusal}; use {SDPA.flag}, which is as exact"
        )


def layer_keywords(
    implementation: str,
    row: PackedRow,
    device: torch.device,
    share: RowShare,
    states: ChunkStates | None = None,
    num_above: int = 0,
) -> dict[str, Any]:
    """Return the keywords of a model's forward pass that tell its layers about a row.

    Args:
        implementation: name in transformers of the attention that the model was given.
        row: N tokens in depth-first preorder.
        device: where the model computes.
        share: this rank's part of the row.
        states: what the row shares with the chunks before it; None for a whole row.
        num_above: tokens above the row, whose keys and values are in `states`.

    Raises:
        ConfigError: the row is a chunk, and the oracle computes whole rows only.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    if backend is not None:
        return {CONTEXT: RowContext(share, backend.layout(row, device, num_above), states)}
    if states is not None:
        raise ConfigError(f"rows in chunks need tree attention, not {implementation}")
    return {"attention_mask": torch.from_numpy(visibility(row)).to(device)[None, None]}

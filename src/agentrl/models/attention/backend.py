"""The protocol of attention back ends, and the adapter to transformers' attention interface.

transformers calls a registered function with queries, keys and values after the rotary embedding,
and passes unknown keywords of the model's forward pass to every layer. The keyword `CONTEXT` carries
the layout of the current row that way, so no model code is forked.

A back end does not know about ranks, chunks or autocast; the adapter handles them with `RowContext`.

Shape legend: H query heads, K key-value heads, N tokens of the row, P tokens above the row, D head
dimension; batch is always 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from transformers import AttentionInterface

from agentrl.data.rows import PackedRow
from agentrl.errors import ConfigError
from agentrl.models.router_replay import ROUTED_EXPERTS
from agentrl.models.row_split import RowShare

CONTEXT = "row_context"
"""Keyword of a model's forward pass that reaches every layer."""

# Keywords that reach attention without affecting it: rotary positions are already applied to queries
# and keys, and experts follow after attention.
_NEUTRAL = frozenset({CONTEXT, ROUTED_EXPERTS, "position_ids", "use_cache", "output_router_logits"})


class AttentionBackend(Protocol):
    """An implementation of attention along the paths of token trees."""

    @property
    def flag(self) -> str:
        """The value of `--attention_implementation` that selects it."""

    @property
    def implementation(self) -> str:
        """Its name in transformers' registry."""

    def refusal(self, device: torch.device) -> str | None:
        """Return why it cannot train on a device, or None if it can."""

    def layout(self, row: PackedRow, device: torch.device, num_above: int) -> Any:
        """Return the layout of a row for `attend`, computed once and shared by all layers.

        Args:
            row: N tokens in depth-first preorder.
            device: where attention is computed.
            num_above: P; tokens on the path above the row if it is a chunk, else 0.
        """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        layout: Any,
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D].

        Args:
            query: [1, H, N, D] after the rotary embedding; same dtype as keys and values.
            key: [1, K, P + N, D], the tokens above the row first.
            value: [1, K, P + N, D].
            scaling: factor on the scores.
            layout: the result of `layout`.
        """


Backend = TypeVar("Backend", bound=AttentionBackend)


class AttentionFunction(Protocol):
    """The function that `register_attention` adapts for transformers."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        context: Any,
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D]; `context` is the forward pass's `CONTEXT`."""


class ChunkStates:
    """Keys and values that pass between the chunks of a row, after the rotary embedding.

    States from above have the shape [1, K, P, D], for the P ancestors of the chunk's first token;
    those of the chunk's own tokens [1, K, N, D].
    """

    def __init__(self, above: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start a chunk.

        Args:
            above: keys and values of the tokens above the chunk, a pair per layer.
        """
        self.above = above
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the chunk's own tokens by layer, filled in by its forward pass."""

    def extend(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record a layer's own keys and values, and return them with those above prepended."""
        self.made[layer] = (key, value)
        if not self.above:
            return key, value
        key_above, value_above = self.above[layer]
        return torch.cat([key_above, key], dim=2), torch.cat([value_above, value], dim=2)


class RowContext:
    """The row of one forward pass, as its attention layers see it.

    Not a dataclass: FSDP2's pre-forward hook rebuilds dataclass arguments for every layer, and what
    a layer records in `states` or in the layout would be lost in the copy.
    """

    def __init__(self, share: RowShare, layout: Any, states: ChunkStates | None = None) -> None:
        """Collect what the layers read.

        Args:
            share: this rank's part of the row.
            layout: the result of the attention back end's `layout`.
            states: keys and values shared with earlier chunks; None for a whole row.
        """
        self.share = share
        self.layout = layout
        self.states = states


def register_attention(implementation: str, attend: AttentionFunction) -> None:
    """Register an attention function with transformers under a name.

    The registered function raises `ConfigError` if a layer asks for more than plain attention, such
    as a sliding window. Ignoring the request would silently compute a different model.
    """

    def adapter(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        _refuse_variants(implementation, {"attention_mask": attention_mask, **keywords})
        context = keywords[CONTEXT]
        return attend(module, query, key, value, scaling=scaling, context=context), None

    AttentionInterface.register(implementation, adapter)


def register_backend(backend: Backend) -> Backend:
    """Register a back end with transformers, with support for rows that are split over ranks."""
    register_attention(backend.implementation, partial(_attend_to_row, backend))
    return backend


def unless_cuda(device: torch.device) -> str | None:
    """Return the refusal of a back end that needs CUDA, or None on a CUDA device."""
    return None if device.type == "cuda" else "trains on CUDA only"


def _attend_to_row(
    backend: AttentionBackend,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    context: RowContext,
) -> torch.Tensor:
    states = context.share.to_heads(query, key, value)
    query, key, value = (_in_one_precision(tensor) for tensor in states)
    if context.states is not None:
        index = module.layer_idx
        assert isinstance(index, int), "transformers numbers its attention layers"
        key, value = context.states.extend(index, key, value)
    output = backend.attend(query, key, value, scaling=scaling, layout=context.layout)
    return context.share.to_tokens(output)


def _refuse_variants(implementation: str, keywords: Mapping[str, object]) -> None:
    for name, value in keywords.items():
        # Layers without a feature pass None for it; `dropout` is a float and must be 0.
        if name in _NEUTRAL or value is None or (name == "dropout" and value == 0.0):
            continue
        raise ConfigError(
            f"the model's attention layers ask for {name}, which {implementation} does not compute"
        )


def _in_one_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return queries, keys or values in autocast's precision.

    Under autocast, norms and rotary embedding leave queries and keys in float32 while values are
    bfloat16. Kernels need equal dtypes, and float32 would double the memory of states that are kept
    for other chunks.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))

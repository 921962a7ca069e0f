"""What attention back ends share: their protocol, and the adapter to transformers' interface.

transformers calls a registered function with queries, keys and values after the rotary embedding,
and hands unknown keywords of the model's forward pass down to every layer. Ours is `CONTEXT`: what
the layers know of the row that they compute. So no model code is forked.

A back end knows neither ranks, chunks nor autocast; `RowContext` and the adapter see to these.

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

# Keywords of a forward pass that reach attention and change nothing in it: rotary positions are in
# queries and keys already, and experts come after it.
_NEUTRAL = frozenset({CONTEXT, ROUTED_EXPERTS, "position_ids", "use_cache", "output_router_logits"})


class AttentionBackend(Protocol):
    """One way of computing attention along the paths of token trees."""

    @property
    def flag(self) -> str:
        """The value of `--attention_implementation` that asks for it."""

    @property
    def implementation(self) -> str:
        """Its name in transformers' registry."""

    def refusal(self, device: torch.device) -> str | None:
        """Return why it cannot train on a device, None where it can."""

    def layout(self, row: PackedRow, device: torch.device, num_above: int) -> Any:
        """Return what `attend` has to know of a row, made once for all layers.

        Args:
            row: N tokens in depth-first preorder.
            device: where attention is computed.
            num_above: P; tokens on the path above the row, where it is a chunk of a longer one.
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
            query: [1, H, N, D] after the rotary embedding, in one precision with keys and values.
            key: [1, K, P + N, D], the tokens above the row first.
            value: [1, K, P + N, D].
            scaling: factor on the scores.
            layout: what `layout` returned.
        """


Backend = TypeVar("Backend", bound=AttentionBackend)


class AttentionFunction(Protocol):
    """What `register_attention` offers to transformers."""

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

    Shapes are [1, K, P, D] above, P tokens on the path of the chunk's first one, and [1, K, N, D]
    for what the chunk makes itself.
    """

    def __init__(self, above: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start a chunk.

        Args:
            above: keys and values of the tokens above the chunk, a pair a layer.
        """
        self.above = above
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the chunk's own tokens by layer, as its forward pass makes them."""

    def extend(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note a layer's own keys and values and put those above in front of them."""
        self.made[layer] = (key, value)
        if not self.above:
            return key, value
        key_above, value_above = self.above[layer]
        return torch.cat([key_above, key], dim=2), torch.cat([value_above, value], dim=2)


class RowContext:
    """What the layers of one forward pass know of the row that they compute.

    Not a dataclass: FSDP2 rebuilds those on their way into every layer, and what a layer notes in
    `states` or in the layout would be lost in the copy.
    """

    def __init__(self, share: RowShare, layout: Any, states: ChunkStates | None = None) -> None:
        """Hold what the layers read.

        Args:
            share: this rank's part of the row.
            layout: what the attention back end's `layout` returned.
            states: what the row shares with the chunks before it; None for a whole row.
        """
        self.share = share
        self.layout = layout
        self.states = states


def register_attention(implementation: str, attend: AttentionFunction) -> None:
    """Offer an attention function to transformers' models under a name.

    The registered function refuses what a layer asks for beyond plain attention, such as a sliding
    window: left out silently, it would give another model's logits.
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
    """Offer a back end to transformers' models under its own name, for rows over ranks too."""
    register_attention(backend.implementation, partial(_attend_to_row, backend))
    return backend


def unless_cuda(device: torch.device) -> str | None:
    """Return the refusal of a back end whose kernel is CUDA's."""
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
        # Layers without the feature hand None, and `dropout` is a float that has to be 0.
        if name in _NEUTRAL or value is None or (name == "dropout" and value == 0.0):
            continue
        raise ConfigError(
            f"the model's attention layers ask for {name}, which {implementation} does not compute"
        )


def _in_one_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return queries, keys or values in the precision that autocast asks for.

    Norms and rotary embedding leave queries and keys in float32, values come in bfloat16. Kernels
    want one precision, and what is kept for other chunks should take no more room than it has to.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))

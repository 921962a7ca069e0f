"""The protocol of attention back ends, and the adapter to transformers' attention interface.

transformers calls a registered function with queries, keys and values after the rotary embedding,
and passes unknown keywords of the model's forward pass to every layer. The keyword `CONTEXT` carries
the layout of the current row that way, so no model code is forked.

Further requirements of a layer (a sliding window, sinks, a cap on scores) arrive as further
keywords. They become an `AttentionVariant`; a back end declares those that it computes, and the
adapter refuses all others. Latent attention differs only in the sizes of its heads.

Back ends are independent of ranks, chunks and autocast; the adapter handles them with `RowContext`.

A compiled layer contains its attention if the row is whole, on one rank, and has a layout that torch's
compiler can trace. Otherwise the layer falls into the parts before and after its attention, and the
kernels between them are called one by one.

Shape legend: H query heads, K key-value heads, N tokens of the row, P tokens above the row, D head
dimension, V head dimension of values; batch is always 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from agentrl.data.rows import PackedRow
from agentrl.errors import ConfigError
from agentrl.models.router_replay import ROUTED_EXPERTS
from agentrl.models.rows.chunk_states import ChunkStates
from agentrl.models.rows.row_split import RowShare
from agentrl.models.rows.row_tree import RowTree

CONTEXT = "row_context"
"""Keyword of a model's forward pass that reaches every layer."""
SEES_OWN_TOKENS = "sees_own_tokens"
"""Attribute of attention layers whose weights are whole on every `tp` rank."""

# Keywords that reach attention without affecting it: rotary positions are already applied to queries
# and keys, and experts follow after attention.
_NEUTRAL = frozenset({CONTEXT, ROUTED_EXPERTS, "position_ids", "use_cache", "output_router_logits"})


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """A layer's requirements for attention; the fields after `scaling` use transformers' keywords."""

    scaling: float
    """Factor on the scores."""
    sliding_window: int | None = None
    """Maximum number of tokens that a query sees: itself and those right above it on its path."""
    softcap: float | None = None
    """Bound c on scaled scores s, which become c * tanh(s / c)."""
    s_aux: torch.Tensor | None = None
    """Sinks [H]: an additional score of each softmax, whose weight goes to no value."""


class AttentionBackend(Protocol):
    """An implementation of attention along the paths of token trees."""

    @property
    def flag(self) -> str:
        """The value of `--attention_implementation` that selects it."""

    @property
    def implementation(self) -> str:
        """Its name in transformers' registry."""

    @property
    def computes(self) -> frozenset[str]:
        """The optional fields of `AttentionVariant` that it honors."""

    def refusal(self, device: torch.device) -> str | None:
        """Return why it cannot train on a device, or None if it can."""

    def layout(
        self, row: PackedRow, device: torch.device, num_above: int, window: int | None
    ) -> Any:
        """Return the layout of a row for `attend`, shared by all layers of a window.

        Args:
            row: N tokens in depth-first preorder.
            device: where attention is computed.
            num_above: P; tokens on the path above the row if it is a chunk, else 0.
            window: most tokens that a query sees; None: its whole path.
        """

    def is_traceable(self, layout: Any) -> bool:
        """Return whether torch's compiler can trace `attend` with a layout."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: Any,
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D].

        Args:
            query: [1, H, N, D] after the rotary embedding; same dtype as keys and values.
            key: [1, K, P + N, D], the tokens above the row first.
            value: [1, K, P + N, D].
            variant: the layer's requirements.
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
        variant: AttentionVariant,
        context: Any,
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, V]; `context` is the forward pass's `CONTEXT`."""


class RowContext:
    """The row of one forward pass, as its layers see it.

    Not a dataclass: FSDP2's pre-forward hook rebuilds dataclass arguments for every layer, and what
    a layer records in `states` or in a layout would be lost in the copy.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        row: PackedRow,
        device: torch.device,
        share: RowShare,
        states: ChunkStates | None = None,
    ) -> None:
        """Collect what the layers read.

        Args:
            backend: computes the attention layers.
            row: N tokens in depth-first preorder.
            device: where the model computes.
            share: this rank's part of the row.
            states: what the row shares with earlier chunks; None for a whole row.
        """
        self.row = row
        self.device = device
        self.share = share
        self.states = states
        self.layer = -1
        """Number of the recurrent layer that is being computed."""
        self._backend = backend
        self._layouts: dict[int | None, Any] = {}
        self.traced: dict[int | None, Any] = {}
        """Window -> layout with which compiled layers trace their attention."""

    @property
    def num_above(self) -> int:
        """The number of tokens on the path above the row."""
        return 0 if self.states is None else self.states.num_above

    @cached_property
    def tree(self) -> RowTree:
        """The row's segments, for recurrent layers."""
        exported = () if self.states is None else self.states.chunk.exports
        return RowTree.of(self.row, self.num_above, exported)

    def layout(self, window: int | None) -> Any:
        """Return the back end's layout for layers with a window, created on first use."""
        if window is not None and window > int(self.row.positions.max(initial=0)):
            window = None
        if window not in self._layouts:
            self._layouts[window] = self._backend.layout(
                self.row, self.device, self.num_above, window
            )
        return self._layouts[window]

    def lay_out(self, windows: Iterable[int | None]) -> None:
        """Create the layouts that compiled layers trace; a compiler cannot create them on first use."""
        if self.states is None and self.share.is_whole:
            layouts = {window: self.layout(window) for window in windows}
            self.traced = {w: one for w, one in layouts.items() if self._backend.is_traceable(one)}


def register_attention(
    implementation: str, attend: AttentionFunction, computes: frozenset[str] = frozenset()
) -> None:
    """Register an attention function with transformers under a name.

    The registered function raises `ConfigError` if a layer requires more than the function
    computes. Ignoring the requirement would silently compute a different model.

    Args:
        implementation: name in transformers' registry.
        attend: the function.
        computes: the optional fields of `AttentionVariant` that it honors.
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
        optional = {name: keywords.pop(name) for name in sorted(computes) if name in keywords}
        _refuse_variants(implementation, {"attention_mask": attention_mask, **keywords})
        variant = AttentionVariant(scaling, **optional)
        return attend(module, query, key, value, variant=variant, context=keywords[CONTEXT]), None

    AttentionInterface.register(implementation, adapter)


def register_backend(backend: Backend) -> Backend:
    """Register a back end with transformers, with support for rows that are split over ranks."""
    # What attention does depends on the row's tree; back ends compile their own kernels.
    untraced = torch.compiler.disable(_attend_to_row)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        context: RowContext,
    ) -> torch.Tensor:
        layout = context.traced.get(variant.sliding_window)
        if layout is None:
            output: torch.Tensor = untraced(
                backend, module, query, key, value, variant=variant, context=context
            )
            return output
        size = value.shape[-1]
        states = (_to_autocast_dtype(tensor) for tensor in _pad_heads(query, key, value))
        return backend.attend(*states, variant=variant, layout=layout)[..., :size]

    register_attention(backend.implementation, attend, backend.computes)
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
    variant: AttentionVariant,
    context: RowContext,
) -> torch.Tensor:
    size, share = value.shape[-1], context.share
    if hasattr(module, SEES_OWN_TOKENS):
        share = share.of_own_tokens()
    query, key, value = _pad_heads(query, key, value)
    states = share.to_heads(query, key, value)
    query, key, value = (_to_autocast_dtype(tensor) for tensor in states)
    if variant.s_aux is not None:
        variant = replace(variant, s_aux=share.own_heads(variant.s_aux))
    if context.states is not None:
        index = module.layer_idx
        assert isinstance(index, int), "transformers numbers its attention layers"
        key, value = context.states.extend(("attention", index), key, value)
    layout = context.layout(variant.sliding_window)
    output = backend.attend(query, key, value, variant=variant, layout=layout)
    return share.to_tokens(output)[..., :size]


def _pad_heads(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad heads with zeros to one size, as kernels require; scores and outputs do not change.

    Latent attention has smaller heads for values than for queries and keys.
    """
    size = max(tensor.shape[-1] for tensor in states)
    return tuple(
        tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))
        for tensor in states
    )


def _refuse_variants(implementation: str, keywords: Mapping[str, object]) -> None:
    for name, value in keywords.items():
        # Layers without a feature pass None for it; `dropout` is a float and must be 0.
        if name in _NEUTRAL or value is None or (name == "dropout" and value == 0.0):
            continue
        raise ConfigError(
            f"the model's attention layers ask for {name}, which {implementation} does not compute"
        )


def _to_autocast_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return queries, keys or values in autocast's precision.

    Under autocast, norms and rotary embedding leave queries and keys in float32 while values are
    bfloat16. Kernels need equal dtypes, and float32 would double the memory of states that are kept
    for other chunks.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))

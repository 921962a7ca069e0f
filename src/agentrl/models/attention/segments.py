"""Attention of segments on CPU without masks, padding, or copies of keys for the backward pass.

A segment attends to the whole path above it and causally to itself. torch's CPU kernel supports both
forms and also returns the log-normalizer of every query; with it, the two outputs combine exactly to
attention over all keys. The gradient with respect to some of the keys depends only on the output and
the normalizer over all keys, so the backward pass calls the kernel's backward for each part (as in
ring attention, Liu et al., arXiv 2310.01889). The backward pass gathers the keys on the path again.

Under a window, segments are cut at its size, so that each sees all of its own tokens and a suffix of
the path. The keys at the far end of that suffix leave the window one query after the other: with
queries and keys in reverse order this triangle is causal as well, a third part for the same kernel.
Sinks only lower the weight of the joined output; they are one more term of its normalizer.

Shape legend: H query heads, K key-value heads, N tokens, P tokens above the row, D head dimension;
batch is always 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agentrl.models.attention.layout import AttentionLayout

_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Segment:
    """Consecutive queries, and the locations of their keys."""

    queries: slice
    """The segment's tokens within the row."""
    above: torch.Tensor | None
    """int64, indices among the keys of the path above the segment that all of its queries see; None
    if there are none."""
    leaving: torch.Tensor | None = None
    """int64, indices among the keys of those above that leave the window within the segment, nearest
    first: query i of Q sees the first Q - 1 - i of them (or all, if they are fewer)."""
    is_causal: bool = True
    """Whether its own tokens see those before them only."""


def segments_of(layout: AttentionLayout, window: int | None = None) -> tuple[Segment, ...]:
    """Return a layout's blocks, each of which is a whole segment, or no longer than the window."""
    segments, first, used = [], 0, 0
    blocks = zip(layout.query_lengths, layout.key_lengths, layout.whole, strict=True)
    for queries, keys, is_whole in blocks:
        above = layout.key_index[used : used + keys - queries]
        num_leaving = 0 if window is None else max(0, keys - window)
        leaving, above = above[:num_leaving], above[num_leaving:]
        segments.append(
            Segment(
                queries=slice(first, first + queries),
                above=torch.from_numpy(above) if len(above) else None,
                leaving=torch.from_numpy(leaving[::-1].copy()) if len(leaving) else None,
                is_causal=not is_whole,
            )
        )
        first, used = first + queries, used + keys
    return tuple(segments)


def attend_along_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[Segment],
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [1, H, N, D].

    Args:
        query: [1, H, N, D], on CPU.
        key: [1, K, P + N, D], the tokens above the row first.
        value: [1, K, P + N, D].
        segments: all of the row.
        scaling: factor on the scores.
        sinks: [H], an additional score of every softmax, without a value.
    """
    output: torch.Tensor = _AlongSegments.apply(query, key, value, segments, scaling, sinks)  # type: ignore[no-untyped-call]
    return output


class _AlongSegments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Sequence[Segment],
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        own, above, leaving = _PartialAttention(query), None, None
        own_keys, own_values = (_repeat_heads(states, query) for states in (key, value))
        for segment in segments:
            queries, q = segment.queries, query[:, :, segment.queries]
            keys, values = own_keys[:, :, queries], own_values[:, :, queries]
            own.put(queries, *_kernel(q, keys, values, 0.0, segment.is_causal, scale=scaling))
            if segment.leaving is not None:
                leaving = leaving or _PartialAttention(query)
                keys, values = (_gather(states, segment.leaving, query) for states in (key, value))
                result = _kernel(_reverse_all_but_last(q), keys, values, 0.0, True, scale=scaling)
                leaving.put(_all_but_last(queries), *(part.flip(2) for part in result))
            if segment.above is not None:
                above = above or _PartialAttention(query)
                keys, values = (states.index_select(2, segment.above) for states in (key, value))
                q = _group_heads(q, key.shape[1])
                above.put(queries, *_kernel(q, keys, values, 0.0, False, scale=scaling))
        total = own
        for part in (above, leaving):
            total = total if part is None else total.join(part)
        if sinks is not None:
            total.add_sinks(sinks)
        output = total.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total.normalizers, sinks)
        ctx.segments, ctx.scaling = segments, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, normalizers, sinks = ctx.saved_tensors
        rows = (grad_output.contiguous(), query, output, normalizers)
        exact = normalizers.dtype
        grad_query, grad_key, grad_value = (
            torch.zeros_like(states, dtype=exact) for states in (query, key, value)
        )
        own_keys, own_values = (_repeat_heads(states, query) for states in (key, value))
        grad_own_keys, grad_own_values = (
            torch.empty_like(states, dtype=exact) for states in (own_keys, own_values)
        )
        for segment in ctx.segments:
            queries = segment.queries
            of_segment = [states[:, :, queries] for states in rows]
            keys, values = own_keys[:, :, queries], own_values[:, :, queries]
            parts = _part_backward(
                of_segment, keys, values, causal=segment.is_causal, scaling=ctx.scaling
            )
            for total, part in zip(
                (grad_query, grad_own_keys, grad_own_values), parts, strict=True
            ):
                total[:, :, queries] = part
            if segment.leaving is not None:
                keys, values = (_gather(states, segment.leaving, query) for states in (key, value))
                parts = _part_backward(
                    [_reverse_all_but_last(states) for states in of_segment],
                    keys,
                    values,
                    causal=True,
                    scaling=ctx.scaling,
                )
                grad_query[:, :, _all_but_last(queries)] += parts[0].flip(2)
                for total, part in zip((grad_key, grad_value), parts[1:], strict=True):
                    summed = _sum_heads(part.to(exact), total.shape[1])
                    total.index_add_(2, segment.leaving, summed)
            if segment.above is not None:
                keys, values = (states.index_select(2, segment.above) for states in (key, value))
                of_segment = [_group_heads(states, key.shape[1]) for states in of_segment]
                parts = _part_backward(of_segment, keys, values, causal=False, scaling=ctx.scaling)
                target = grad_query[:, :, queries]
                target += parts[0].reshape(target.shape)
                for total, part in zip((grad_key, grad_value), parts[1:], strict=True):
                    total.index_add_(2, segment.above, part.to(exact))
        num_above = key.shape[2] - query.shape[2]
        for total, of_heads in ((grad_key, grad_own_keys), (grad_value, grad_own_values)):
            total[:, :, num_above:] += _sum_heads(of_heads, total.shape[1])
        gradients = (grad_query, grad_key, grad_value)
        return (
            *(gradient.to(query.dtype) for gradient in gradients),
            None,
            None,
            None if sinks is None else _sink_gradient(sinks, grad_output, output, normalizers),
        )


class _PartialAttention:
    """Attention outputs and normalizers of all queries of a row over a subset of their keys."""

    def __init__(self, query: torch.Tensor) -> None:
        exact = torch.promote_types(query.dtype, torch.float32)
        self.output = torch.zeros_like(query, dtype=exact)
        """[1, H, N, D]."""
        self.normalizers = query.new_full(query.shape[:3], -torch.inf, dtype=exact)
        """[1, H, N], logarithms; minus infinity for queries without keys in the subset."""

    def put(self, queries: slice, output: torch.Tensor, normalizers: torch.Tensor) -> None:
        """Store the kernel's result for some queries; heads may be grouped as by `_group_heads`."""
        target = self.output[:, :, queries]
        target.copy_(output.reshape(target.shape))
        self.normalizers[:, :, queries] = normalizers.reshape(target.shape[:3])

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Add scores without values [H] to every softmax (in place)."""
        scores = sinks.to(self.normalizers.dtype)[None, :, None]
        normalizers = torch.logaddexp(self.normalizers, scores)
        self.output *= (self.normalizers - normalizers).exp()[..., None]
        self.normalizers = normalizers

    def join(self, other: "_PartialAttention") -> "_PartialAttention":
        """Return attention over the union of two disjoint subsets of keys (in place).

        Each output is weighted by its share exp(own normalizer - joint normalizer) of the softmax.
        """
        normalizers = torch.logaddexp(self.normalizers, other.normalizers)
        self.output *= (self.normalizers - normalizers).exp()[..., None]
        self.output += other.output * (other.normalizers - normalizers).exp()[..., None]
        self.normalizers = normalizers
        return self


def _part_backward(
    of_segment: Sequence[torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values from one part of the keys.

    Args:
        of_segment: gradient of the output, queries, output and normalizers over *all* keys.
        keys: with the same number of heads as the queries.
        values: of the same shape.
        causal: whether keys and queries are the same tokens.
        scaling: factor on the scores.
    """
    grad_output, query, output, normalizers = of_segment
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _kernel_backward(
        grad_output, query, keys, values, output, normalizers, 0.0, causal, scale=scaling
    )
    return gradients


def _sink_gradient(
    sinks: torch.Tensor,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    normalizers: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient [H] of the sinks: a softmax's weight times minus its mean gradient."""
    weights = (sinks.to(normalizers.dtype)[None, :, None] - normalizers).exp()
    mean = (grad_output.to(weights.dtype) * output.to(weights.dtype)).sum(dim=-1)
    return -(weights * mean).sum(dim=(0, 2)).to(sinks.dtype)


def _all_but_last(queries: slice) -> slice:
    return slice(queries.start, queries.stop - 1)


def _reverse_all_but_last(states: torch.Tensor) -> torch.Tensor:
    """Return all but the last query in reverse order."""
    return states[:, :, :-1].flip(2)


def _gather(states: torch.Tensor, index: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values at some indices, repeated for each query head."""
    return states.index_select(2, index).repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _repeat_heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the row's own keys or values, repeated for each query head: [1, H, N, D]."""
    own = states[:, :, states.shape[2] - query.shape[2] :]
    return own.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _sum_heads(gradients: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Sum gradients of repeated heads: the backward pass of `_repeat_heads`."""
    return gradients.reshape(1, num_groups, -1, *gradients.shape[2:]).sum(dim=2)


def _group_heads(states: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Fold the query heads of a group into queries of one head: [1, K, H / K * queries, ...].

    Exact without a causal mask, where a query's position does not matter; keys need no repetition.
    """
    return states.reshape(1, num_groups, -1, *states.shape[3:])

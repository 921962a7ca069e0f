"""Attention over the cache rows, plugged into transformers' attention interface.

A step computes N tokens in one forward pass of batch 1: first one token for each decoding row, then
the new tokens of each sequence that is being prefilled. All other layers treat the N
tokens independently. Attention reads `StepPlan`, which is passed through the layers as a keyword,
so no model code is forked.

Decoding is bound by reading keys and values. Rows often begin alike (tools, system prompt, question):
such positions are read once for a group of rows, as in Hydragen (Juravsky et al., 2024), and the two
parts of the softmax are joined by their log-sum-exps.

Shape legend: N tokens of the step, H query heads, K key-value heads, D head dimension, R rows,
T positions.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.models.attention.backend import AttentionVariant, register_attention
from agentrl.plugins.engine.generation.kv_cache import KVCache, common_prefix
from agentrl.plugins.engine.generation.token_sequence import TokenSequence

ENGINE_ATTENTION = "agentrl_engine"
_HEAD = 64
"""Leading tokens by which rows that begin alike are found; shorter ones are not worth a second pass."""
_MIN_SAVED = 1024
"""Positions that a step must read less than without sharing."""


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, end)` of the sequence in a row, to be computed in one step."""

    row: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class SharedPositions:
    """The first positions of all decoding rows, grouped by equal contents."""

    length: int
    groups: tuple[torch.Tensor, ...]
    """int64 [rows of the group] each: the rows whose keys and values there are the same."""

    @classmethod
    def of(cls, decoding: Sequence[TokenSequence]) -> "SharedPositions | None":
        """Return what rows 0, 1, ... share; None if that is too little."""
        alike: dict[Hashable, list[TokenSequence]] = {}
        for row, sequence in enumerate(decoding):
            alike.setdefault(_start_of(sequence, row, _HEAD), []).append(sequence)
        most = max(alike.values(), key=len, default=[])
        if len(most) < 2:
            return None
        # Each row has a position of its own: the token to be computed.
        length = min(sequence.length - 1 for sequence in decoding)
        prompt = most[0].tokens[: min(length, most[0].num_prompt)]
        for sequence in most[1:]:
            length = common_prefix(sequence.tokens[: sequence.num_prompt], prompt, longer_than=0)
            prompt = prompt[:length]
        if length < _HEAD:
            return None
        groups: dict[Hashable, list[int]] = {}
        for row, sequence in enumerate(decoding):
            groups.setdefault(_start_of(sequence, row, length), []).append(row)
        if (len(decoding) - len(groups)) * length < _MIN_SAVED:
            return None
        return cls(length, tuple(torch.tensor(rows) for rows in groups.values()))


def _start_of(sequence: TokenSequence, row: int, length: int) -> Hashable:
    """Return what the keys and values of the first positions of a row depend on.

    Only prompts are shared: equal outputs may have been sampled under different weights.
    """
    if sequence.epoch < 0 or length > sequence.num_prompt:
        return row
    return sequence.epoch, sequence.namespace, sequence.tokens[:length].tobytes()


@dataclass(frozen=True)
class StepPlan:
    """Cache positions of a step's tokens, and the positions that they attend to."""

    cache: torch.Tensor
    """[L, 2, R, K, T, D]."""
    slots: torch.Tensor
    """int64 [N * K], (row * K + head) * T + position of each token's heads."""
    num_decoding: int
    """The first tokens belong to rows 0, 1, ... one each."""
    decode_length: int
    """Positions of the longest decoding row, the new token included."""
    decode_bias: torch.Tensor | None
    """[num_decoding, 1, 1, decode_length - shared positions]: 0, or -inf past a row's end."""
    shared: SharedPositions | None
    chunks: tuple[Chunk, ...]
    chunk_masks: tuple[torch.Tensor | None, ...]
    """bool [queries, keys] each, or None if plain causal attention suffices."""


def plan_step(
    cache: KVCache, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]
) -> StepPlan:
    """Return the plan of a step, for whose tokens the cache has room.

    `decoding` are rows 0, 1, ... with the token to be computed.
    """
    num_decoding = len(decoding)
    lengths = np.array([sequence.length for sequence in decoding], dtype=np.int64)
    is_on_cpu = cache.tensor.device.type == "cpu"
    shared = SharedPositions.of(decoding) if is_on_cpu else None
    num_heads, row_length = cache.tensor.shape[3:5]
    rows = np.concatenate([np.arange(num_decoding), *(np.full(c.size, c.row) for c in chunks)])
    positions = np.concatenate([lengths - 1, *(np.arange(c.start, c.end) for c in chunks)])
    slots = (rows[:, None] * num_heads + np.arange(num_heads)) * row_length + positions[:, None]
    decode_length = int(lengths.max()) if num_decoding else 0
    bias = None
    if num_decoding and int(lengths.min()) < decode_length:
        past_end = (
            np.arange(0 if shared is None else shared.length, decode_length) >= lengths[:, None]
        )
        bias = torch.zeros(past_end.shape, dtype=cache.tensor.dtype)
        bias.masked_fill_(torch.as_tensor(past_end), float("-inf"))
        bias = bias[:, None, None, :]
    return StepPlan(
        cache=cache.tensor,
        slots=torch.as_tensor(slots.reshape(-1)),
        num_decoding=num_decoding,
        decode_length=decode_length,
        decode_bias=bias,
        shared=shared,
        chunks=tuple(chunks),
        chunk_masks=tuple(_mask(chunk) for chunk in chunks),
    )


def _mask(chunk: Chunk) -> torch.Tensor | None:
    if chunk.start == 0 or chunk.size == 1:
        return None
    return torch.ones(chunk.size, chunk.end, dtype=torch.bool).tril(chunk.start)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    variant: AttentionVariant,
    context: StepPlan,
) -> torch.Tensor:
    """Write the new keys and values to the cache and attend to the rows; see `AttentionFunction`."""
    keys, values = context.cache[int(module.layer_idx)]  # type: ignore[arg-type]
    num_heads, _room, head_dim = keys.shape[1:]
    for cached, new in ((keys, key), (values, value)):
        by_token = new[0].transpose(0, 1).reshape(-1, head_dim)
        cached.view(-1, head_dim).index_copy_(0, context.slots, by_token)
    queries = query[0].transpose(0, 1)  # [N, H, D]
    outputs = []
    count = context.num_decoding
    if count:
        # The queries that share a key-value head take the dimension of query positions.
        decoding = queries[:count].reshape(count, num_heads, -1, head_dim)
        start = 0 if context.shared is None else context.shared.length
        own_keys, own_values = (
            states[:count, :, start : context.decode_length] for states in (keys, values)
        )
        bias, scale = context.decode_bias, variant.scaling
        if context.shared is None:
            found = scaled_dot_product_attention(
                decoding, own_keys, own_values, attn_mask=bias, scale=scale
            )
        else:
            attended = _with_sums(decoding, own_keys, own_values, attn_mask=bias, scale=scale)
            found = _join_shared(decoding, keys, values, context.shared, attended, scale)
        outputs.append(found.reshape(count, -1, head_dim))
    offset = count
    for chunk, mask in zip(context.chunks, context.chunk_masks, strict=True):
        size = chunk.size
        out = scaled_dot_product_attention(
            queries[offset : offset + size].transpose(0, 1).unsqueeze(0),
            keys[chunk.row : chunk.row + 1, :, : chunk.end],
            values[chunk.row : chunk.row + 1, :, : chunk.end],
            attn_mask=mask,
            is_causal=mask is None and size > 1,
            scale=variant.scaling,
            enable_gqa=True,
        )
        outputs.append(out[0].transpose(0, 1))
        offset += size
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _join_shared(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shared: SharedPositions,
    attended: tuple[torch.Tensor, torch.Tensor],
    scale: float | None,
) -> torch.Tensor:
    """Join the shared positions, which each group reads once, to attention over a row's own ones.

    Args:
        queries: of the decoding rows, [R, K, H / K, D], as is the result.
        keys: of a layer, like the values.
        values: [rows, K, T, D].
        shared: the positions.
        attended: the result of `_with_sums` over each row's own positions.
        scale: factor on the scores.
    """
    own, own_sums = attended
    of_prefix, prefix_sums = torch.empty_like(own), torch.empty_like(own_sums)
    num_heads, head_dim = queries.shape[1], queries.shape[3]
    for rows in shared.groups:
        first = int(rows[0])
        # [rows, K, H / K, D] -> [1, K, rows * H / K, D]
        of_group = queries[rows].transpose(0, 1).reshape(1, num_heads, -1, head_dim)
        found, sums = _with_sums(
            of_group,
            keys[first : first + 1, :, : shared.length],
            values[first : first + 1, :, : shared.length],
            scale=scale,
        )
        by_row = (num_heads, len(rows), -1)
        of_prefix[rows] = found.reshape(*by_row, head_dim).transpose(0, 1)
        prefix_sums[rows] = sums.reshape(by_row).transpose(0, 1)
    # Weights of the two parts: exp(own) / (exp(own) + exp(prefix)).
    weight = torch.sigmoid(own_sums - prefix_sums).unsqueeze(-1).to(own.dtype)
    return torch.lerp(of_prefix, own, weight)


_with_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention on a CPU, and the log-sum-exp [R, K, queries] of each query's scores."""
register_attention(ENGINE_ATTENTION, _attend)

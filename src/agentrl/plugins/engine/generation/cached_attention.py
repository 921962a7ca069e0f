"""Attention over the cache rows, plugged into transformers' attention interface.

A step computes N tokens in one forward pass of batch 1: first one token for each decoding row, then
the new tokens of each sequence that is being prefilled. All other layers treat the N
tokens independently. Attention reads `StepPlan`, which is passed through the layers as a keyword,
so no model code is forked.

Shape legend: N tokens of the step, H query heads, K key-value heads, D head dimension, R rows,
T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.models.attention.backend import AttentionVariant, register_attention
from agentrl.plugins.engine.generation.kv_cache import KVCache

ENGINE_ATTENTION = "agentrl_engine"


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
    """[num_decoding, 1, 1, decode_length]: 0, or -inf past a row's end."""
    chunks: tuple[Chunk, ...]
    chunk_masks: tuple[torch.Tensor | None, ...]
    """bool [queries, keys] each, or None if plain causal attention suffices."""


def plan_step(cache: KVCache, decode_lengths: Sequence[int], chunks: Sequence[Chunk]) -> StepPlan:
    """Return the plan of a step, for whose tokens the cache has room.

    `decode_lengths` are the positions of rows 0, 1, ... with the token to be computed.
    """
    num_decoding = len(decode_lengths)
    lengths = np.asarray(decode_lengths, dtype=np.int64)
    num_heads, row_length = cache.tensor.shape[3:5]
    rows = np.concatenate([np.arange(num_decoding), *(np.full(c.size, c.row) for c in chunks)])
    positions = np.concatenate([lengths - 1, *(np.arange(c.start, c.end) for c in chunks)])
    slots = (rows[:, None] * num_heads + np.arange(num_heads)) * row_length + positions[:, None]
    decode_length = int(lengths.max()) if num_decoding else 0
    bias = None
    if num_decoding and int(lengths.min()) < decode_length:
        past_end = np.arange(decode_length) >= lengths[:, None]
        bias = torch.zeros(past_end.shape, dtype=cache.tensor.dtype)
        bias.masked_fill_(torch.as_tensor(past_end), float("-inf"))
        bias = bias[:, None, None, :]
    return StepPlan(
        cache=cache.tensor,
        slots=torch.as_tensor(slots.reshape(-1)),
        num_decoding=num_decoding,
        decode_length=decode_length,
        decode_bias=bias,
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
        outputs.append(
            scaled_dot_product_attention(
                queries[:count].reshape(count, num_heads, -1, head_dim),
                keys[:count, :, : context.decode_length],
                values[:count, :, : context.decode_length],
                attn_mask=context.decode_bias,
                scale=variant.scaling,
            ).reshape(count, -1, head_dim)
        )
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


register_attention(ENGINE_ATTENTION, _attend)

"""Keys and values: rows of running sequences, and prefixes kept of ended ones.

Running sequences live in one tensor whose leading rows are all in use, so that a decode step reads
a view of it and gathers nothing. The keys and values of an ended sequence are cut to its length and
kept in a `PrefixStore` until memory is short; a new sequence starts with a copy of the longest
known prefix.

Shape legend: L layers, R rows, T positions, K key-value heads, D head dimension.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError

_INITIAL_ROWS = 8
_INITIAL_LENGTH = 256
_SLACK = 256
"""Unit of a row's length when the memory is nearly used up."""
_MIN_GAIN = 1.25
"""Times the rows for which rows become shorter."""
# Shorter prefixes are faster to compute than to look up.
MIN_PREFIX = 8


class CacheMemoryError(InferenceError):
    """The memory for more keys and values could not be allocated."""


@dataclass(frozen=True)
class KVShape:
    """Size of one token's keys and values."""

    num_layers: int
    num_heads: int
    """Key-value heads."""
    head_dim: int
    dtype: torch.dtype
    device: torch.device | None = None
    """Where they lie; None: the CPU."""

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


def kv_shape(model: PreTrainedModel, *, is_plain: bool) -> KVShape:
    """Return the size of one token's keys and values.

    Plain: all layers have the same number and size; otherwise the size of hidden states is an upper
    bound.
    """
    config = model.config.get_text_config()
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if not is_plain:
        return KVShape(layers, 1, config.hidden_size, model.dtype, model.device)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape(layers, config.num_key_value_heads, head_dim, model.dtype, model.device)


@dataclass(frozen=True)
class RowLimits:
    """The running sequences that a cache may hold, one in each row."""

    num_rows: int
    length: int
    """Positions of a row."""
    num_tokens: int
    """Positions of all rows together; a single row may exceed it."""

    @property
    def max_tokens(self) -> int:
        """Positions that all rows together may really have."""
        return max(self.num_tokens, self.length)

    def fit(self, num_rows: int, length: int) -> bool:
        """Return whether this many rows of this length are within the limits."""
        if num_rows > self.num_rows or length > self.length:
            return False
        return num_rows == 1 or num_rows * length <= self.num_tokens


class KVCache:
    """Rows of running sequences. Grows with rows and lengths, up to its limits."""

    can_be_cut = True
    """Whether a part of a computed sequence can be reused from its start."""

    def __init__(self, shape: KVShape, limits: RowLimits) -> None:
        self._shape = shape
        self._limits = limits
        self.tensor = self._allocate(
            min(_INITIAL_ROWS, limits.num_rows), min(_INITIAL_LENGTH, limits.length)
        )
        """[L, 2, R, K, T, D]; index 0 of the second axis holds keys, 1 values.

        Positions of one head are contiguous: attention reads them twice as fast as interleaved
        ones.
        """

    @property
    def length(self) -> int:
        """Positions that a row has now."""
        return self.tensor.shape[4]

    def ensure(self, num_rows: int, length: int) -> bool:
        """Make room and keep the rows' contents; return False if it does not fit.

        Raises `CacheMemoryError` if memory is short within the limits; nothing has changed then.
        """
        limits = self._limits
        if not limits.fit(num_rows, length):
            return False
        rows, capacity = self.tensor.shape[2], self.length
        if num_rows <= rows and length <= capacity:
            return True
        new_rows = rows if num_rows <= rows else min(max(num_rows, 2 * rows), limits.num_rows)
        new_capacity = (
            capacity if length <= capacity else min(max(length, 2 * capacity), limits.length)
        )
        if not limits.fit(new_rows, new_capacity):
            # As much as the limits allow: without slack, every further token or row copies the cache.
            slack = min(-length % _SLACK, limits.num_tokens // max(num_rows, 1) - length)
            new_capacity = min(length + max(slack, 0), limits.length)
            most = min(limits.num_tokens // new_capacity, limits.num_rows)
            if new_capacity < capacity and rows < num_rows <= most < _MIN_GAIN * rows:
                return False  # shorter rows for a few more would be copied to longer ones soon
            new_rows = max(num_rows, most, 1)
        old = self.tensor
        self.tensor = self._allocate(new_rows, new_capacity)
        rows, capacity = min(rows, new_rows), min(capacity, new_capacity)
        self.tensor[:, :, :rows, :, :capacity] = old[:, :, :rows, :, :capacity]
        return True

    def release(self) -> None:
        """Release the memory; `ensure` allocates what is needed again."""
        self.tensor = self._allocate(0, 0)

    def start(self, row: int) -> None:
        """Do nothing: positions of a row are written before they are read."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the leading positions of one row to another."""
        self.tensor[:, :, target, :, :length] = self.tensor[:, :, source, :, :length]

    def fill(self, row: int, prefix: torch.Tensor, length: int) -> None:
        """Write the first positions of a prefix [L, 2, K, T, D] to the start of a row."""
        self.tensor[:, :, row, :, :length] = prefix[:, :, :, :length]

    def prefix(self, row: int, length: int) -> torch.Tensor:
        """Return a view of the first positions of a row, [L, 2, K, T, D]."""
        return self.tensor[:, :, row, :, :length]

    def _allocate(self, num_rows: int, length: int) -> torch.Tensor:
        # Zeros, because positions past a row's end are read and weighted with 0.
        shape = self._shape
        size = (shape.num_layers, 2, num_rows, shape.num_heads, length, shape.head_dim)
        try:
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        except (RuntimeError, MemoryError) as error:
            raise CacheMemoryError(
                f"the key-value cache cannot grow to {num_rows} x {length} tokens "
                f"({num_rows * length * shape.token_bytes / 1e6:.0f} MB): memory is short"
            ) from error


@dataclass(eq=False)
class Prefix:
    """Tokens and their cached values."""

    namespace: str
    tokens: np.ndarray
    """int32 [T]."""
    kv: Any
    """Argument of `KVCache.fill`: [L, 2, K, T, D], or the data of another kind of cache."""
    routed_experts: np.ndarray | None
    """int16 [T, W], see `TokenSequence.routed_experts`."""


class PrefixStore:
    """Prefixes of ended sequences; the least recently used are evicted first.

    All belong to the live weights; call `clear` when these change.
    """

    def __init__(self, shape: KVShape, max_bytes: int) -> None:
        self._max_tokens = max_bytes // shape.token_bytes
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()
        self.num_tokens = 0

    @property
    def keeps_any(self) -> bool:
        """Whether there is room for a single token."""
        return self._max_tokens > 0

    def find(
        self, namespace: str, tokens: np.ndarray, longer_than: int, *, whole: bool = False
    ) -> tuple[int, Prefix | None]:
        """Return the length of the longest known prefix and its location.

        Matches of length `longer_than` or less do not count and, if `whole`, neither do those of
        only a part of a prefix.
        """
        best, found = longer_than, None
        for prefix in self._prefixes.values():
            if prefix.namespace == namespace:
                length = common_prefix(prefix.tokens, tokens, longer_than=best)
                if length > best and not (whole and length < len(prefix.tokens)):
                    best, found = length, prefix
        if found is not None:
            self._prefixes.move_to_end(id(found))
        return best, found

    def add(
        self,
        namespace: str,
        tokens: np.ndarray,
        kv: Any,
        routed_experts: np.ndarray | None = None,
    ) -> None:
        """Keep a copy. Prefixes that it continues are dropped, since it contains them."""
        if not MIN_PREFIX <= len(tokens) <= self._max_tokens:
            return
        continued: list[Prefix] = []
        for prefix in self._prefixes.values():
            if prefix.namespace != namespace:
                continue
            shorter = min(len(prefix.tokens), len(tokens))
            if common_prefix(prefix.tokens, tokens, longer_than=shorter - 1) < shorter:
                continue
            if len(prefix.tokens) >= len(tokens):
                return
            continued.append(prefix)
        for prefix in continued:
            self._drop(prefix)
        while self._prefixes and self.num_tokens + len(tokens) > self._max_tokens:
            self._drop(next(iter(self._prefixes.values())))
        experts = None if routed_experts is None else routed_experts.copy()
        added = Prefix(namespace, tokens.copy(), kv.clone(), experts)
        self._prefixes[id(added)] = added
        self.num_tokens += len(tokens)

    def clear(self) -> None:
        """Forget everything."""
        self._prefixes.clear()
        self.num_tokens = 0

    def _drop(self, prefix: Prefix) -> None:
        del self._prefixes[id(prefix)]
        self.num_tokens -= len(prefix.tokens)


def common_prefix(tokens: np.ndarray, others: np.ndarray, longer_than: int) -> int:
    """Return the length of the common prefix, or `longer_than` if it is not longer."""
    length = min(len(tokens), len(others))
    # Most candidates are rejected here by comparing a single token.
    if length <= longer_than or tokens[longer_than] != others[longer_than]:
        return longer_than
    differs = tokens[:length] != others[:length]
    first = int(differs.argmax())
    common = first if differs[first] else length
    return max(common, longer_than)

"""Prefixes and cache rows."""

import numpy as np
import pytest
import torch

from agentrl.plugins.engine.generation.kv_cache import (
    KVCache,
    KVShape,
    PrefixStore,
    RowLimits,
    common_prefix,
)

SHAPE = KVShape(num_layers=2, num_heads=1, head_dim=4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("known", "wanted", "longer_than", "length"),
    [
        ([1, 2, 3], [1, 2, 4], 0, 2),
        ([1, 2, 3], [1, 2, 3, 4], 0, 3),
        ([1, 2, 3], [1, 2, 3], 2, 3),
        ([1, 2, 3], [1, 2, 3], 3, 3),
        ([9, 2, 3], [1, 2, 3], 0, 0),
        ([9, 2, 3, 4], [1, 2, 3, 4], 2, 2),
        ([], [1], 0, 0),
    ],
)
def test_common_prefix_is_found_beyond_what_is_known(
    known: list[int], wanted: list[int], longer_than: int, length: int
) -> None:
    assert common_prefix(np.array(known), np.array(wanted), longer_than) == length


def test_growing_keeps_what_rows_hold() -> None:
    cache = KVCache(SHAPE, RowLimits(num_rows=64, length=2048, num_tokens=1 << 18))
    prefix = torch.randn(2, 2, 1, 100, 4)
    cache.fill(3, prefix, 100)
    assert cache.ensure(40, 1000)
    assert cache.length >= 1000
    torch.testing.assert_close(cache.prefix(3, 100), prefix)
    cache.move(3, 39, 100)
    torch.testing.assert_close(cache.prefix(39, 100), prefix)


def test_bounds_are_kept_except_for_a_single_row() -> None:
    cache = KVCache(SHAPE, RowLimits(num_rows=64, length=2048, num_tokens=1000))
    assert cache.ensure(10, 100)
    assert cache.tensor.shape[2] * cache.length <= 8 * 256
    assert not cache.ensure(10, 101)
    assert cache.ensure(1, 2048)
    assert not cache.ensure(1, 2049)
    assert not cache.ensure(65, 1)


def test_rows_grow_near_the_bound_without_copying_the_cache_for_each_token() -> None:
    cache = KVCache(SHAPE, RowLimits(num_rows=64, length=8192, num_tokens=46_000))
    copies = 0

    def ensure(num_rows: int, length: int) -> bool:
        nonlocal copies
        before = cache.tensor.data_ptr()
        is_room = cache.ensure(num_rows, length)
        assert cache.tensor.shape[2] * cache.length <= 46_000
        copies += cache.tensor.data_ptr() != before
        return is_room

    # Rows of 2,000 tokens are admitted one by one, and then grow until the memory is used up.
    assert all(ensure(rows, 2000 + rows) for rows in range(1, 21))
    assert all(ensure(20, 2021 + n) for n in range(280))
    assert copies <= 8
    assert not ensure(20, 2301)
    # A longer row comes and goes between shorter ones, which keep at least 17 places.
    assert ensure(17, 2500)
    copies = 0
    for _ in range(10):
        assert ensure(17, 2050)
        ensure(19, 2050)
        assert ensure(16, 2450)
    assert copies <= 1
    # Many short ones get their places.
    assert ensure(40, 1000)


def test_store_finds_the_longest_and_forgets_the_least_used() -> None:
    store = PrefixStore(SHAPE, 100 * SHAPE.token_bytes)
    kv = torch.randn(2, 2, 1, 40, 4)
    tokens = [np.arange(n, n + 40) for n in (0, 1000, 2000)]
    store.add("", tokens[0], kv)
    store.add("", tokens[1], kv)
    length, found = store.find("", np.concatenate([tokens[0], [7]]), 0)
    assert length == 40
    assert found is not None
    store.add("", tokens[2], kv)
    assert store.num_tokens == 80
    assert [store.find("", ids, 0)[0] for ids in tokens] == [40, 0, 40]
    assert store.find("other", tokens[0], 0) == (0, None)


def test_kept_prefix_is_a_copy() -> None:
    store = PrefixStore(SHAPE, 100 * SHAPE.token_bytes)
    kv = torch.ones(2, 2, 1, 20, 4)
    store.add("", np.arange(20), kv)
    kv.zero_()
    _, found = store.find("", np.arange(20), 0)
    assert found is not None
    assert float(found.kv.min()) == 1


def test_prefix_of_a_kept_one_is_not_kept_twice() -> None:
    store = PrefixStore(SHAPE, 1000 * SHAPE.token_bytes)
    kv = torch.ones(2, 2, 1, 40, 4)
    store.add("", np.arange(40), kv)
    store.add("", np.arange(30), kv[:, :, :, :30])
    assert store.num_tokens == 40

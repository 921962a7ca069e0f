"""Weights in parts."""

import pytest
import torch

from agentrl.distributed.broadcast import in_buckets, in_thread
from agentrl.errors import BroadcastError


def group(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{size}", torch.zeros(size, dtype=torch.uint8)) for size in sizes]


def test_buckets_keep_order_groups_and_bound_and_the_last_one_says_so() -> None:
    buckets = list(in_buckets([group(40), group(50), group(5, 6), group(300), group(1)], 100))
    assert [bucket.names for bucket in buckets] == [
        ("t40", "t50"),
        ("t5", "t6"),
        ("t300",),
        ("t1",),
    ]
    assert [bucket.is_last for bucket in buckets] == [False, False, False, True]
    assert list(in_buckets([], 100)) == []


def test_a_bucket_holds_the_memory_that_it_was_given() -> None:
    weight = torch.zeros(3, 4, dtype=torch.bfloat16)
    (bucket,) = in_buckets([[("whole", weight), ("turned", weight.T)]], 100)
    assert bucket.tensors[0].data_ptr() == weight.data_ptr()
    assert bucket.tensors[1].is_contiguous()
    assert bucket.dtypes == ("bfloat16", "bfloat16")
    assert bucket.shapes == ((3, 4), (4, 3))
    assert bucket.on_cpu().tensors[0] is weight


async def test_whatever_an_operation_raises_ends_the_wait_for_it() -> None:
    def refused() -> None:
        raise ValueError("the device is not supported")

    with pytest.raises(BroadcastError, match="the device is not supported"):
        await in_thread(refused)

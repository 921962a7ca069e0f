"""Operations of a pass, against the counts by hand."""

import numpy as np
import pytest
import torch
from harness.trees import SHAPE, tiny_policy

from agentrl.data.rows import PackedRow, empty_row
from agentrl.models.flops import FlopCount, peak_tflops


def star() -> PackedRow:
    """Two tokens that three branches of one token share; the last token of each is a target."""
    return PackedRow(
        token_ids=np.arange(5),
        positions=np.array([0, 1, 2, 2, 2]),
        subtree_ends=np.array([5, 5, 3, 4, 5]),
        sources=np.array([1, 1, 1, 2]),
        targets=np.array([2, 3, 4, 0]),
        temperatures=np.ones(4, dtype=np.float32),
    )


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_row_costs_its_tokens_its_visible_pairs_and_its_distinct_head_positions(
    architecture: str,
) -> None:
    policy = tiny_policy(architecture)
    layers = sum(p.numel() for n, p in policy.named_parameters() if "layers" in n)
    norm = SHAPE["hidden_size"]
    pairs = 1 + 2 + 3 * 3
    heads = SHAPE["num_hidden_layers"] * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    expected = 6 * (layers + norm) * 5 + 12 * heads * pairs
    expected += 6 * SHAPE["hidden_size"] * SHAPE["vocab_size"] * 2
    assert FlopCount.of(policy).row(star()) == expected


def test_an_empty_row_costs_one_token() -> None:
    count = FlopCount.of(tiny_policy())
    assert count.row(empty_row()) == count.per_token + count.per_pair


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert peak_tflops(torch.device("cpu")) is None

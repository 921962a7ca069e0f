"""Attention along the paths of trees: both of its forms against the dense oracle."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from harness.trees import flat_gradient, make_turn, random_group, relative_error, tiny_policy
from support.dense_attention import DENSE_ATTENTION

from agentrl.data.rows import PackedRow, TokenTree
from agentrl.data.tokens import turn_tokens
from agentrl.models.attention.sdpa import RowLayout, block_layout
from agentrl.models.policy import PolicyModel, target_logprobs

torch.set_num_threads(1)


def logprobs_and_gradient(policy: PolicyModel, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = target_logprobs(policy, row).logprobs
    logprobs.square().sum().backward()
    gradient = flat_gradient(policy)
    return logprobs.detach(), gradient


def assert_as_the_oracle(architecture: str, row: PackedRow) -> None:
    expected = logprobs_and_gradient(tiny_policy(architecture, attention=DENSE_ATTENTION), row)
    found = logprobs_and_gradient(tiny_policy(architecture), row)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 1e-12


def long_row() -> PackedRow:
    """Segments of hundreds of tokens at three depths, so that kernels work through several tiles."""
    ids = [(7 * place + place // 13) % 40 for place in range(900)]
    turns = [
        make_turn(f"t/{number}", 0, ids[:shared], ids[shared + number :])
        for number, shared in enumerate([700, 700, 300, 5])
    ]
    return TokenTree.from_tokens(turn_tokens(turns)).row


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_segments_longer_than_a_tile_give_the_gradients_of_the_oracle(architecture: str) -> None:
    assert_as_the_oracle(architecture, long_row())


def short_row() -> PackedRow:
    return TokenTree.from_tokens(random_group(5).turns).row


@pytest.mark.parametrize(
    ("max_block", "make_row"),
    [
        (3, short_row),
        (512, short_row),
        pytest.param(3, long_row, marks=pytest.mark.slow),
        pytest.param(512, long_row, marks=pytest.mark.slow),
    ],
)
def test_blocks_with_masks_give_the_gradients_of_the_oracle(
    max_block: int, make_row: Callable[[], PackedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other devices than the CPU compute, on the CPU."""
    monkeypatch.setattr(RowLayout, "has_segments", False)
    monkeypatch.setattr(
        "agentrl.models.attention.sdpa.block_layout", partial(block_layout, max_block=max_block)
    )
    assert_as_the_oracle("qwen3", make_row())


def test_nothing_is_gathered_twice_for_the_backward_pass() -> None:
    """What is kept of attention grows with the row, not with its paths."""
    turns = [make_turn(f"t/{number}", 0, [1] * 400, [number, 7, 7]) for number in range(30)]
    row = TokenTree.from_tokens(turn_tokens(turns)).row
    kept = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        target_logprobs(tiny_policy(), row)
    assert max(max(shape, default=0) for shape in kept) == row.num_tokens
    assert row.num_tokens < 500

"""Merged training is exact on fixed groups, whatever the packing, and planted bugs show."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from harness.trees import gradient, num_chunked, random_group, relative_error, tiny_policy
from support.dense_attention import DENSE_ATTENTION
from support.separate import sampled_by, separate_gradient
from torch.nn.functional import scaled_dot_product_attention

from agentrl.algorithms.reductions import Reduction
from agentrl.data.batch import MicroBatch, StepBatch, build_step
from agentrl.data.rows import Merge, TokenTree
from agentrl.models.attention.backend import AttentionVariant
from agentrl.models.attention.sdpa import BlockLayout, SDPABackend, block_layout
from agentrl.models.load import wrap_policy

torch.set_num_threads(1)
GROUPS = sampled_by(tiny_policy(), [random_group(seed) for seed in range(3)])
UNBOUNDED = 10**6
Spoil = Callable[[MicroBatch], MicroBatch]
DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Other families are in `test_families.py`."""


def step(
    merge: Merge = "tree",
    token_budget: int = UNBOUNDED,
    num_ranks: int = 1,
    reduction: Reduction = "token_mean",
) -> StepBatch:
    return build_step(
        GROUPS,
        policy_version=3,
        token_budget=token_budget,
        merge=merge,
        num_ranks=num_ranks,
        reduction=reduction,
    )


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_merged_gradients_equal_those_of_separate_turns(
    architecture: str, dtype: torch.dtype, bound: float
) -> None:
    policy = tiny_policy(architecture, dtype)
    loss, expected = separate_gradient(policy, GROUPS)
    for merge in get_args(Merge):
        merged_loss, merged = gradient(policy, step(merge))
        assert relative_error(merged, expected) <= bound
        assert merged_loss == pytest.approx(loss, rel=bound * 10)


def test_the_groups_branch_and_share() -> None:
    tree, linear, flat = (
        sum(TokenTree.from_tokens(group.turns, merge=merge).num_tokens for group in GROUPS)
        for merge in ("tree", "linear", "none")
    )
    assert tree < 0.6 * flat
    assert tree < linear < flat


@pytest.mark.parametrize("kind", ["GRPO", "MINIRL", "GSPO", "CISPO"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum"])
def test_loss_does_not_depend_on_packing_merging_or_ranks(kind: str, reduction: Reduction) -> None:
    policy = tiny_policy()
    loss, expected = gradient(policy, step(reduction=reduction), kind=kind)
    for batch in (
        step("none", reduction=reduction),
        step("tree", 25, reduction=reduction),
        step("linear", 50, 2, reduction=reduction),
        step("tree", UNBOUNDED, 5, reduction=reduction),
        step("tree", 12, reduction=reduction),
        step("tree", 30, 2, reduction=reduction),
    ):
        other_loss, other = gradient(policy, batch, kind=kind)
        assert other_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert relative_error(other, expected) <= 1e-10


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_trees_beyond_the_budget_are_exact(
    architecture: str, dtype: torch.dtype, bound: float
) -> None:
    policy = tiny_policy(architecture, dtype)
    _, expected = separate_gradient(policy, GROUPS)
    batch = step(token_budget=12)
    assert num_chunked(batch) >= len(GROUPS)
    assert relative_error(gradient(policy, batch)[1], expected) <= bound


def test_head_chunks_change_nothing() -> None:
    policy = tiny_policy()
    _, whole = gradient(policy, step())
    _, chunked = gradient(policy, step(), chunk_size=7)
    assert relative_error(chunked, whole) <= 1e-12


def test_gradient_checkpointing_changes_nothing() -> None:
    policy = tiny_policy()
    _, plain = gradient(policy, step())
    recomputing = wrap_policy(policy.model, gradient_checkpointing=True)
    assert policy.model.model.layers[0].gradient_checkpointing
    _, checkpointed = gradient(recomputing, step())
    assert relative_error(checkpointed, plain) <= 1e-12


def test_order_of_records_does_not_matter() -> None:
    policy = tiny_policy()
    _, expected = gradient(policy, step())
    shuffled = [replace(group, turns=group.turns[::-1]) for group in GROUPS[::-1]]
    batch = build_step(shuffled, policy_version=3, token_budget=UNBOUNDED)
    assert relative_error(gradient(policy, batch)[1], expected) <= 1e-12


# Planted bugs: each must move the gradient far from the oracle's.


def spoiled(change: Spoil) -> StepBatch:
    batch = step()
    return replace(
        batch, micro_batches=tuple(tuple(change(m) for m in share) for share in batch.micro_batches)
    )


def blind_to_branches(micro_batch: MicroBatch) -> MicroBatch:
    row = micro_batch.row
    return replace(
        micro_batch, row=replace(row, subtree_ends=np.full(row.num_tokens, row.num_tokens))
    )


def packed_positions(micro_batch: MicroBatch) -> MicroBatch:
    row = micro_batch.row
    return replace(micro_batch, row=replace(row, positions=np.arange(row.num_tokens)))


def shared_token_once(micro_batch: MicroBatch) -> MicroBatch:
    pairs = np.stack([micro_batch.row.sources, micro_batch.row.targets], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    weights = np.zeros_like(micro_batch.weights)
    weights[first] = micro_batch.weights[first]
    return replace(micro_batch, weights=weights)


def neighbours_label(micro_batch: MicroBatch) -> MicroBatch:
    row = micro_batch.row
    after = np.minimum(row.sources + 1, row.num_tokens - 1)
    return replace(micro_batch, row=replace(row, targets=row.token_ids[after]))


def counts_nodes(micro_batch: MicroBatch) -> MicroBatch:
    factor = micro_batch.row.num_targets / len(np.unique(micro_batch.row.sources))
    return replace(micro_batch, weights=micro_batch.weights * factor)


@pytest.mark.parametrize(
    "bug",
    [blind_to_branches, packed_positions, shared_token_once, neighbours_label, counts_nodes],
)
def test_planted_bug_shows(bug: Spoil) -> None:
    policy = tiny_policy(attention=DENSE_ATTENTION)
    _, expected = separate_gradient(policy, GROUPS)
    assert relative_error(gradient(policy, step())[1], expected) <= 1e-12
    assert relative_error(gradient(policy, spoiled(bug))[1], expected) > 1e-3


def forgets_ancestors(
    _backend: SDPABackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    variant: AttentionVariant,
    layout: BlockLayout,
) -> torch.Tensor:
    """Tree attention whose keys and values above a block carry no gradient."""
    outputs = []
    start = used = 0
    assert layout.key_index is not None
    for queries, keys in zip(layout.query_lengths, layout.key_lengths, strict=True):
        index = layout.key_index[used : used + keys]
        above, own = index[: keys - queries], index[keys - queries :]
        near, said = (
            torch.cat([s[:, :, above].detach(), s[:, :, own]], dim=2).repeat_interleave(2, dim=1)
            for s in (key, value)
        )
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start : start + queries],
                near,
                said,
                attn_mask=layout.masks.lower_right(queries, keys, query),
                scale=variant.scaling,
            )
        )
        start, used = start + queries, used + keys
    return torch.cat(outputs, dim=2).transpose(1, 2)


def test_dropping_the_gradient_of_ancestors_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    loss, expected = separate_gradient(policy, GROUPS)
    monkeypatch.setattr(SDPABackend, "layout", lambda _self, *row: block_layout(*row))
    monkeypatch.setattr(SDPABackend, "attend", forgets_ancestors)
    spoiled_loss, found = gradient(policy, step())
    assert spoiled_loss == pytest.approx(loss, rel=1e-9)
    assert relative_error(found, expected) > 1e-3

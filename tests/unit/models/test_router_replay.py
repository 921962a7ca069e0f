"""Tokens go to the experts that a row names, with the router's own weights and gradients."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.trees import (
    gradient,
    random_group,
    random_routes,
    relative_error,
    routed_group,
    tiny_policy,
)

from agentrl.data.batch import build_step
from agentrl.data.rows import Merge, PackedRow, TokenTree
from agentrl.data.tokens import TurnTokens, agree_on_experts
from agentrl.errors import TrainingError
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel, target_logprobs

torch.set_num_threads(1)


def own_choices(policy: PolicyModel, row: PackedRow) -> np.ndarray:
    """What the routers choose by themselves, [N, W]."""
    seen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
        for layer in policy.model.model.layers
    ]
    target_logprobs(policy, row)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).flatten(1).numpy().astype(np.int16)


def test_replaying_what_the_router_chooses_changes_nothing() -> None:
    policy = tiny_policy("qwen3_moe", torch.float32)
    row = TokenTree.from_tokens(random_group(1).turns).row
    plain = target_logprobs(policy, row).logprobs
    routed = replace(row, routed_experts=own_choices(policy, row))
    assert torch.equal(target_logprobs(policy, routed).logprobs, plain)
    unknown = replace(row, routed_experts=np.full_like(routed.routed_experts, -1))
    assert torch.equal(target_logprobs(policy, unknown).logprobs, plain)


def test_other_experts_give_other_logprobs_and_are_forgotten_with_their_row() -> None:
    policy = tiny_policy("qwen3_moe", torch.float32)
    row = TokenTree.from_tokens(random_group(1).turns).row
    plain = target_logprobs(policy, row).logprobs
    other = replace(row, routed_experts=random_routes(0, row.num_tokens, layers=2, experts=4))
    assert (target_logprobs(policy, other).logprobs - plain).abs().max() > 1e-3
    assert other.routed_experts is not None
    assert np.array_equal(own_choices(policy, other), other.routed_experts)
    assert torch.equal(target_logprobs(policy, row).logprobs, plain)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("token_budget", [10**6, 40, 15], ids=["whole", "in-bins", "in-chunks"])
def test_replayed_gradients_of_trees_equal_those_of_separate_turns(
    token_budget: int, recomputes: bool
) -> None:
    groups = [routed_group(seed) for seed in range(2)]

    def gradients(merge: Merge, budget: int, recomputes: bool) -> tuple[float, torch.Tensor]:
        policy = tiny_policy("qwen3_moe", torch.float64)
        policy = wrap_policy(policy.model, gradient_checkpointing=recomputes)
        return gradient(
            policy, build_step(groups, policy_version=3, token_budget=budget, merge=merge)
        )

    expected_loss, expected = gradients("none", 10**6, recomputes=False)
    loss, found = gradients("tree", token_budget, recomputes)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert relative_error(found, expected) <= 1e-12


def test_shared_tokens_go_where_the_first_record_went_and_conflicts_are_counted() -> None:
    group = routed_group(3)
    turns, num_conflicts = agree_on_experts(group.turns)
    assert num_conflicts > 0
    assert [turn.turn_id for turn in turns] == [turn.turn_id for turn in group.turns]
    before = {turn.turn_id: turn.routed_experts for turn in group.turns}
    assert_one_choice_for_each_token(turns)
    first = min(turns, key=lambda turn: turn.path.astype(">u4").tobytes())
    own = before[first.turn_id]
    assert first.routed_experts is not None
    assert own is not None
    assert np.array_equal(first.routed_experts, own)
    assert agree_on_experts(turns)[1] == 0
    step = build_step([group], policy_version=3, token_budget=10**6)
    assert step.stats.num_expert_conflicts == num_conflicts


def assert_one_choice_for_each_token(turns: Sequence[TurnTokens]) -> None:
    by_prefix: dict[bytes, bytes] = {}
    for turn in turns:
        assert turn.routed_experts is not None
        for end in range(1, len(turn.path) + 1):
            choice = turn.routed_experts[end - 1].tobytes()
            assert by_prefix.setdefault(turn.path[:end].tobytes(), choice) == choice


def test_records_without_routes_take_those_of_records_that_share_their_tokens() -> None:
    group = routed_group(3)
    for record_id in {turn.record_id for turn in group.turns}:
        turns = [
            turn if turn.record_id == record_id else replace(turn, routed_experts=None)
            for turn in group.turns
        ]
        settled, _ = agree_on_experts(turns)
        assert_one_choice_for_each_token(settled)
        others = [turn for turn in settled if turn.record_id != record_id]
        choices = np.concatenate([turn.routed_experts for turn in others])
        assert (choices >= 0).any(), "tokens are shared"
        assert (choices == -1).any(), "and others are not"
    nobody = [replace(turn, routed_experts=None) for turn in group.turns]
    assert agree_on_experts(nobody) == (tuple(nobody), 0)


def test_routes_of_another_model_are_refused() -> None:
    row = TokenTree.from_tokens(random_group(1).turns).row
    row = replace(row, routed_experts=np.zeros((row.num_tokens, 6), dtype=np.int16))
    with pytest.raises(
        TrainingError, match="6 experts per token, but this model has 2 layers with 2"
    ):
        target_logprobs(tiny_policy("qwen3_moe", torch.float32), row)

"""Mixture-of-experts models: routing is a token's own matter, so trees change nothing."""

import pytest
import torch
from harness.trees import gradient, random_group, relative_error, tiny_policy

from agentrl.data.batch import build_step
from agentrl.data.rows import Merge

torch.set_num_threads(1)
GROUPS = [random_group(seed) for seed in range(2)]


def loss_and_gradient(merge: Merge, token_budget: int) -> tuple[float, torch.Tensor]:
    batch = build_step(GROUPS, policy_version=3, token_budget=token_budget, merge=merge)
    return gradient(tiny_policy("qwen3_moe", torch.float32), batch)


@pytest.mark.parametrize("token_budget", [10**6, 15], ids=["whole", "in-chunks"])
def test_merged_gradients_of_experts_equal_those_of_separate_turns(token_budget: int) -> None:
    expected_loss, expected = loss_and_gradient("none", 10**6)
    loss, found = loss_and_gradient("tree", token_budget)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_error(found, expected) <= 1e-5

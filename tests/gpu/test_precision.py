"""What a GPU computes in bfloat16 is as near the float64 oracle merged as it is in separate rows."""

import pytest
import torch
from harness.trees import gradient, random_group, relative_error, tiny_policy
from support.separate import sampled_by, separate_gradient

from agentrl.data import build_step
from agentrl.data.rows import Merge

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("merge", ["tree", "linear"])
@pytest.mark.parametrize("token_budget", [10**9, 30])
def test_merged_bfloat16_is_as_exact_as_separate_rows(
    architecture: str, merge: Merge, token_budget: int
) -> None:
    rounded = tiny_policy(
        architecture, torch.bfloat16, attention="agentrl_flex", head_dim=16
    ).float()
    exact = tiny_policy(architecture, torch.float64, head_dim=16)
    exact.load_state_dict({name: value.double() for name, value in rounded.state_dict().items()})
    groups = sampled_by(exact, [random_group(seed) for seed in range(4)], noise=0.05)
    _, oracle = separate_gradient(exact, groups, kind="REINFORCE")

    def error(merge: Merge, token_budget: int) -> float:
        step = build_step(groups, policy_version=3, token_budget=token_budget, merge=merge)
        bfloat16 = torch.autocast("cuda", dtype=torch.bfloat16)
        _, found = gradient(rounded.cuda(), step, kind="REINFORCE", autocast=bfloat16)
        return relative_error(found.cpu().double(), oracle)

    assert error(merge, token_budget) <= 1.5 * error("none", 10**9)

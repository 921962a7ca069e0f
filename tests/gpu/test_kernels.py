"""FlexAttention's and variable-length kernels against SDPA along the paths."""

import pytest
import torch
from harness.trees import flat_gradient, random_group, relative_error, tiny_policy

from agentrl.data.rows import PackedRow, TokenTree
from agentrl.models.policy import ChunkedPass, PolicyModel, target_logprobs

pytestmark = pytest.mark.gpu
ROWS = [
    TokenTree.from_tokens(
        [t for seed in seeds for t in random_group(seed, num_records=5, num_turns=6).turns]
    ).row
    for seeds in (range(8), range(8, 11))
]


def gradient(policy: PolicyModel, row: PackedRow, num_chunks: int = 1) -> torch.Tensor:
    policy.zero_grad(set_to_none=True)
    if num_chunks == 1:
        target_logprobs(policy, row).logprobs.sum().backward()
    else:
        passes = ChunkedPass(policy, row, num_chunks=num_chunks)
        passes.backward(torch.ones_like(passes.forward().logprobs))
    return flat_gradient(policy)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_gradients_are_those_of_sdpa(architecture: str, num_chunks: int) -> None:
    flex, sdpa = (
        tiny_policy(architecture, torch.float32, attention=attention, head_dim=16).cuda()
        for attention in ("agentrl_flex", "agentrl_tree")
    )
    for row in ROWS:  # two lengths: one compilation serves both
        found, expected = gradient(flex, row, num_chunks), gradient(sdpa, row)
        assert relative_error(found, expected) <= 1e-4


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_varlen_in_bfloat16_is_as_near_as_flex(architecture: str, num_chunks: int) -> None:
    exact = tiny_policy(architecture, torch.float32, head_dim=16).cuda()
    errors = {}
    for attention in ("agentrl_flex", "agentrl_varlen"):
        policy = tiny_policy(architecture, torch.float32, attention=attention, head_dim=16).cuda()
        found = []
        for row in ROWS:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found.append(gradient(policy, row, num_chunks))
        errors[attention] = max(
            relative_error(one, gradient(exact, row)) for one, row in zip(found, ROWS, strict=True)
        )
    assert errors["agentrl_varlen"] <= 1.5 * errors["agentrl_flex"]

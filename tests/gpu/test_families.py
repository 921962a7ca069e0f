"""Every family on CUDA: its passes are those of the CPU, and its attention those of other kernels."""

import pytest
import torch
from harness.tiny_families import FAMILIES, tiny_model
from harness.trees import gradient, random_group, relative_error

from agentrl.data import build_step
from agentrl.models.attention.attention_registry import TREE_ATTENTION, set_attention
from agentrl.models.attention.sdpa import SDPA
from agentrl.models.compilation import compile_policy
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation"),
]
GROUPS = [random_group(seed, num_records=3, num_turns=3) for seed in range(2)]
WHOLE, IN_CHUNKS = 10**6, 12


def policy_of(family: str, dtype: torch.dtype, attention: str, *, recomputed: bool) -> PolicyModel:
    torch.manual_seed(0)
    model = tiny_model(family, dtype)
    set_attention(model, attention)
    return wrap_policy(model, gradient_checkpointing=recomputed)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu(family: str) -> None:
    for token_budget in (WHOLE, IN_CHUNKS):
        step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
        recomputed = token_budget == IN_CHUNKS
        policy = policy_of(family, torch.float64, TREE_ATTENTION, recomputed=recomputed)
        loss, expected = gradient(policy, step, kind="REINFORCE")
        found_loss, found = gradient(policy.cuda(), step, kind="REINFORCE")
        assert found_loss == pytest.approx(loss, rel=1e-10)
        assert relative_error(found.cpu(), expected) <= 1e-10


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "olmo3", "deepseek_v3"])
@pytest.mark.parametrize("token_budget", [WHOLE, IN_CHUNKS])
def test_flex_computes_sinks_caps_windows_and_latent_heads(family: str, token_budget: int) -> None:
    step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
    gradients = []
    for attention in (TREE_ATTENTION, SDPA.implementation):
        policy = policy_of(family, torch.float32, attention, recomputed=False)
        gradients.append(gradient(policy.cuda(), step, kind="REINFORCE")[1])
    assert relative_error(*gradients) <= 1e-4


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("token_budget", [WHOLE, IN_CHUNKS])
def test_compiled_gradients_are_those_without_compilation(family: str, token_budget: int) -> None:
    step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
    plain, compiled = (
        policy_of(family, torch.float32, TREE_ATTENTION, recomputed=True).cuda() for _ in range(2)
    )
    compile_policy(compiled, torch.device("cuda"))
    expected, found = (gradient(policy, step, kind="REINFORCE")[1] for policy in (plain, compiled))
    assert relative_error(found, expected) <= 1e-4

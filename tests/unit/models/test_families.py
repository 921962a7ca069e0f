"""Every family of the list trains on trees exactly: against one turn a pass through its own model."""

import pytest
import torch
from harness.tiny_families import FAMILIES, FURTHER_FAMILIES, tiny_model
from harness.tiny_vision import VISION_FAMILIES
from harness.trees import gradient, num_chunked, random_group, relative_error

from agentrl.data.batch import build_step
from agentrl.models.attention.attention_registry import TREE_ATTENTION, with_own_attention
from agentrl.models.families import TREE_FAMILIES
from agentrl.models.load import wrap_policy

torch.set_num_threads(1)
GROUPS = [random_group(seed, num_records=3, num_turns=3) for seed in range(2)]
EVERY_KIND = ("gpt_oss", "deepseek_v3", "granite", "qwen3_5_text", "nemotron_h", "lfm2")
"""Sinks and windows, latent heads, scaled logits, delta rule, Mamba-2, short convolution."""


def test_the_list_has_what_is_tested_and_nothing_else() -> None:
    texts = {model_type for model_type, _ in (FAMILIES | FURTHER_FAMILIES).values()}
    assert texts | VISION_FAMILIES.keys() == TREE_FAMILIES  # images are tested in `test_vision.py`


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EVERY_KIND else pytest.mark.slow)
        for family in (*FAMILIES, *FURTHER_FAMILIES)
    ],
)
def test_gradients_of_trees_are_those_of_turns_through_the_model_as_it_came(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model)
    # Trees as small as these hold segments that are copied and segments whose state passes on.
    monkeypatch.setattr("agentrl.models.rows.row_tree._LONGEST_STUB", 2)
    with with_own_attention(model):
        alone = build_step(GROUPS, policy_version=3, token_budget=1, merge="none")
        loss, expected = gradient(policy, alone, kind="REINFORCE")
    assert len(alone.micro_batches[0]) == sum(len(group.turns) for group in GROUPS)
    recomputing = wrap_policy(model, gradient_checkpointing=True)
    for trained, token_budget in ((policy, 10**6), (policy, 40), (recomputing, 12)):
        step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
        merged_loss, merged = gradient(trained, step, kind="REINFORCE")
        assert merged_loss == pytest.approx(loss, rel=1e-11)
        assert relative_error(merged, expected) <= 1e-12
        assert (num_chunked(step) > 0) == (token_budget == 12)


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_a_delta_rule_may_take_any_number_of_calls(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model)
    step = build_step(GROUPS, policy_version=3, token_budget=10**6)
    found = []
    for tokens in (10**6, 2):
        monkeypatch.setattr("agentrl.models.recurrent.scan._BLOCK", tokens)
        found.append(gradient(policy, step, kind="REINFORCE"))
    (whole_loss, whole), (loss, divided) = found
    assert loss == pytest.approx(whole_loss, rel=1e-11)
    assert relative_error(divided, whole) <= 1e-12
    assert not torch.equal(divided, whole), "both took the same calls"

"""What every attention back end is offered to transformers with."""

from typing import Any

import pytest
import torch
from harness.trees import random_group, tiny_policy
from support.dense_attention import DENSE_ATTENTION

from agentrl.data.rows import TokenTree
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import BACKENDS, implementation_of
from agentrl.models.policy import PolicyModel, target_logprobs

ROW = TokenTree.from_tokens(random_group(5).turns).row
IMPLEMENTATIONS = [backend.implementation for backend in BACKENDS]
VALUES = {
    "sliding_window": 4,
    "s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64),
    "softcap": 3.0,
}
BEYOND = {
    name: {*VALUES} - {*backend.computes}
    for name, backend in zip(IMPLEMENTATIONS, BACKENDS, strict=True)
}


def asking_for(policy: PolicyModel, **keywords: Any) -> PolicyModel:
    """The policy, whose first layer asks attention for something of its own."""
    layers: Any = policy.model.base_model.layers
    attend = layers[0].self_attn
    forward = attend.forward
    for keyword, value in keywords.items():
        if keyword == "sliding_window":  # this the layer sets by itself
            attend.sliding_window = value
        else:
            attend.forward = lambda *a, k=keyword, v=value, **options: forward(
                *a, **options, **{k: v}
            )
    return policy


@pytest.mark.parametrize(
    ("attention", "keyword"),
    [
        *((name, keyword) for name, keywords in BEYOND.items() for keyword in sorted(keywords)),
        *((name, "position_bias") for name in IMPLEMENTATIONS),
    ],
)
def test_what_a_back_end_does_not_compute_is_refused(attention: str, keyword: str) -> None:
    policy = tiny_policy(attention=attention)
    asking_for(policy, **{keyword: VALUES.get(keyword, 1)})
    with pytest.raises(ConfigError, match=f"ask for {keyword}, which {attention} does not"):
        target_logprobs(policy, ROW)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("keyword", VALUES)
@pytest.mark.parametrize("attention", ["agentrl_tree", "agentrl_flex"])
@torch.no_grad()
def test_a_variant_is_that_of_the_dense_oracle(attention: str, keyword: str) -> None:
    found, expected, plain = (
        target_logprobs(policy, ROW).logprobs
        for policy in (
            asking_for(tiny_policy(attention=attention), **{keyword: VALUES[keyword]}),
            asking_for(tiny_policy(attention=DENSE_ATTENTION), **{keyword: VALUES[keyword]}),
            tiny_policy(attention=attention),
        )
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert (found - plain).abs().max() > 1e-3


def test_every_back_end_has_a_flag_of_its_own() -> None:
    assert [implementation_of(backend.flag) for backend in BACKENDS] == IMPLEMENTATIONS
    assert len(set(IMPLEMENTATIONS)) == len(IMPLEMENTATIONS)

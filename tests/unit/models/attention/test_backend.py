"""What every attention back end is offered to transformers with."""

from typing import Any

import pytest
import torch
from support.trees import random_group, tiny_policy

from agentrl.data.tree import TokenTree
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import BACKENDS, implementation_of
from agentrl.models.policy import target_logprobs

ROW = TokenTree.from_tokens(random_group(5).turns).row
IMPLEMENTATIONS = [backend.implementation for backend in BACKENDS]


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("keyword", "value"),
    [("sliding_window", 8), ("s_aux", torch.zeros(4)), ("softcap", 30.0), ("dropout", 0.1)],
)
def test_what_a_layer_asks_for_beyond_plain_attention_is_refused(
    attention: str, keyword: str, value: Any
) -> None:
    policy = tiny_policy(attention=attention)
    layers: Any = policy.model.base_model.layers
    attend = layers[0].self_attn
    forward = attend.forward
    attend.forward = lambda *arguments, **options: forward(*arguments, **options | {keyword: value})
    if keyword in ("sliding_window", "dropout"):  # these the layer sets by itself
        attend.forward = forward
        setattr(attend, {"dropout": "attention_dropout"}.get(keyword, keyword), value)
    with pytest.raises(ConfigError, match=f"ask for {keyword}, which {attention} does not"):
        target_logprobs(policy, ROW)


def test_every_back_end_has_a_flag_of_its_own() -> None:
    assert [implementation_of(backend.flag) for backend in BACKENDS] == IMPLEMENTATIONS
    assert len(set(IMPLEMENTATIONS)) == len(IMPLEMENTATIONS)

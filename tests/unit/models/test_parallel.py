from typing import Any

import numpy as np
import pytest
from support.tiny_families import tiny_model
from support.trees import random_group
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.data.tree import TokenTree
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError
from agentrl.models.architectures import check_parallel_support
from agentrl.models.parallel import check_divisible
from agentrl.models.row_split import RowSplit

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(tp=3), "--tp_size 3 does not divide the model's num_attention_heads 8"),
        (MeshShape(tp=8), "--tp_size 8 does not divide the model's num_key_value_heads 4"),
        (MeshShape(cp=3), "--cp_size 3 does not divide the model's 8 query heads"),
        (MeshShape(cp=4, tp=4), "8 query heads .4 key-value heads. / --tp_size 4"),
        (MeshShape(ep=2), "--ep_size 2 needs a mixture-of-experts model"),
    ],
)
def test_meshes_that_do_not_fit_a_dense_model_are_refused(shape: MeshShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel_support(Qwen3Config(**SIZES), shape)


def test_experts_are_dealt_out_evenly_or_not_at_all() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=12)
    check_parallel_support(config, MeshShape(ep=3, tp=4))
    with pytest.raises(ConfigError, match=r"--ep_size 5 x --tp_size 1 does not divide .* 12 exp"):
        check_parallel_support(config, MeshShape(ep=5))


def test_more_ranks_than_heads_of_keys_share_one() -> None:
    check_parallel_support(Qwen3Config(**SIZES), MeshShape(cp=8))


def test_a_row_that_is_not_split_is_taken_as_it_is() -> None:
    row = TokenTree.from_tokens(random_group(1).turns).row
    share = RowSplit().share(row)
    assert np.array_equal(share.own(row.token_ids), row.token_ids)
    assert share.own_targets(row) is row


@pytest.mark.parametrize(
    ("family", "sizes", "problem"),
    [
        ("lfm2", {"cp": 2}, "--cp_size: recurrent layers .lfm2. are not divided"),
        ("lfm2", {"tp": 2}, "--tp_size: recurrent layers .lfm2. are not divided"),
        ("gpt_oss", {"tp": 2}, "--tp_size: mlp.router, self_attn.sinks in layers of gpt_oss"),
        ("glm4", {"tp": 2}, "--tp_size: mlp.activation_fn, mlp.gate_up_proj, post_mlp"),
        ("olmo2", {"tp": 2}, "--tp_size: post_feedforward_layernorm, self_attn.k_norm"),
        ("deepseek_v3", {"ep": 2}, "--ep_size: experts as DeepseekV3MoE has them are not divided"),
        ("qwen3", {"tp": 2}, None),
        ("qwen3_moe", {"tp": 2, "ep": 2, "cp": 2}, None),
        ("gpt_oss", {"cp": 2}, None),
    ],
)
def test_layers_that_are_arranged_otherwise_are_not_divided(
    family: str, sizes: dict[str, int], problem: str | None
) -> None:
    sizes = {"tp": 1, "cp": 1, "ep": 1} | sizes
    if problem is None:
        check_divisible(tiny_model(family), **sizes)
        return
    with pytest.raises(ConfigError, match=problem):
        check_divisible(tiny_model(family), **sizes)

from typing import Any

import numpy as np
import pytest
from harness.tiny_families import tiny_config, tiny_model
from harness.tiny_vision import vision_config
from harness.trees import random_group
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.data.rows import TokenTree
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.architectures import check_parallel_support
from agentrl.models.parallel import check_divisible
from agentrl.models.rows.row_split import RowSplit

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(tp=3), "--tp_size 3 does not divide the model's num_attention_heads 8"),
        (MeshShape(tp=8), "--tp_size 8 does not divide the model's num_key_value_heads 4"),
        (MeshShape(cp=3), "--cp_size 3 does not divide the model's 8 query heads"),
        (MeshShape(cp=4, tp=4), "8 query heads .4 key-value heads. / --tp_size 4"),
        (MeshShape(ep=2), "--ep_size 2 needs a mixture-of-experts model"),
        (MeshShape(pp=64), "--pp_size 64 is more than the model's 32 layers"),
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


def test_heads_of_scans_are_spread_evenly_and_their_groups_shared() -> None:
    config = tiny_config("qwen3_5_text")  # 4 heads, in 2 groups
    check_parallel_support(config, MeshShape(cp=2, tp=2))
    config.linear_num_value_heads = 6
    with pytest.raises(ConfigError, match=r"--cp_size 4 x --tp_size 1 .* linear_num_value_heads 6"):
        check_parallel_support(config, MeshShape(cp=4))


def test_models_that_read_images_divide_their_rows_alone() -> None:
    config = vision_config("qwen3_vl")
    check_parallel_support(config, MeshShape(cp=2))
    for sizes, flag in (({"tp": 2}, "--tp_size 2"), ({"pp": 2}, "--pp_size 2")):
        with pytest.raises(ConfigError, match=f"{flag}: models that read images"):
            check_parallel_support(config, MeshShape(**sizes))


def test_a_row_that_is_not_split_is_taken_as_it_is() -> None:
    row = TokenTree.from_tokens(random_group(1).turns).row
    share = RowSplit().share(row)
    assert np.array_equal(share.own(row.token_ids), row.token_ids)
    assert share.own_targets(row) is row


@pytest.mark.parametrize(
    ("family", "sizes", "problem"),
    [
        ("gemma4_text", {"tp": 2}, "--tp_size: each layer of gemma4_text has its own embeddings"),
        ("nemotron_h", {"ep": 2}, "--ep_size: the experts of NemotronHMoE cannot be divided"),
        ("qwen3", {"tp": 2}, None),
        ("qwen3_moe", {"tp": 2, "ep": 2}, None),
        ("gpt_oss", {"tp": 2}, None),
        ("lfm2", {"tp": 2}, None),
    ],
)
def test_layers_that_are_arranged_otherwise_are_not_divided(
    family: str, sizes: dict[str, int], problem: str | None
) -> None:
    sizes = {"tp": 1, "ep": 1} | sizes
    if problem is None:
        check_divisible(tiny_model(family), **sizes)
        return
    with pytest.raises(ConfigError, match=problem):
        check_divisible(tiny_model(family), **sizes)

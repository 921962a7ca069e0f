"""Everything about FlexAttention but its compiled kernel: masks and visited blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.trees import random_group, tiny_policy
from support.dense_attention import DENSE_ATTENTION, visibility
from torch.nn.attention.flex_attention import flex_attention

from agentrl.data.rows import BLOCK, PackedRow, TokenTree, key_ends, plan_blocks
from agentrl.errors import ConfigError
from agentrl.models.attention.flex import FLEX
from agentrl.models.load import load_policy
from agentrl.models.policy import ChunkedPass, target_logprobs
from agentrl.models.rows.row_chunks import cut_row

# On CPU the uncompiled computation is meant: it is what the masks are checked with.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = [TokenTree.from_tokens(random_group(seed).turns).row for seed in (5, 6)]
LONG_ROW = TokenTree.from_tokens(
    [t for seed in range(8) for t in random_group(seed, num_records=5, num_turns=6).turns]
).row


def mask_of(row: PackedRow, num_above: int = 0) -> np.ndarray:
    layout = FLEX.layout(row, CPU, num_above)
    assert all(length % BLOCK == 0 for length in layout.seq_lengths)
    zero = torch.tensor(0)
    queries, keys = (torch.arange(length) for length in layout.seq_lengths)
    mask = layout.mask_mod(zero, zero, queries[:, None], keys[None]).numpy()
    assert not mask[row.num_tokens :].any(), "padding sees nothing"
    assert not mask[:, num_above + row.num_tokens :].any(), "nothing sees padding"
    return mask[: row.num_tokens, : num_above + row.num_tokens]


@pytest.mark.parametrize("row", ROWS)
def test_the_mask_is_that_of_the_oracle(row: PackedRow) -> None:
    assert (mask_of(row) == visibility(row)).all()


@pytest.mark.parametrize("num_chunks", [2, 7])
def test_the_mask_of_a_chunk_is_cut_out_of_the_oracle(num_chunks: int) -> None:
    row = ROWS[0]
    for chunk in cut_row(row, num_chunks):
        assert chunk is not None
        keys = np.concatenate([chunk.above, np.arange(row.num_tokens)[chunk.tokens]])
        mask = mask_of(chunk.row, len(chunk.above))
        assert (mask == visibility(row)[chunk.tokens][:, keys]).all()


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks_are_visited_only_where_something_is_visible(block: int) -> None:
    row = LONG_ROW
    plan = plan_blocks(key_ends(row), block=block)
    size = -(-row.num_tokens // block) * block
    dense = np.zeros((size, size), dtype=bool)
    dense[: row.num_tokens, : row.num_tokens] = visibility(row)
    tiles = dense.reshape(size // block, block, size // block, block)
    seen, whole = tiles.any(axis=(1, 3)), tiles.all(axis=(1, 3))
    assert not (seen & ~(plan.partial | plan.full)).any()
    assert not (plan.full & ~whole).any()
    assert not (plan.full & plan.partial).any()
    # Extremes of a block are a bound; how many blocks it visits in vain stays small.
    assert (plan.partial | plan.full).sum() <= 1.5 * seen.sum()


def test_the_block_mask_lists_the_planned_blocks() -> None:
    plan = plan_blocks(key_ends(LONG_ROW))
    assert LONG_ROW.num_tokens > 2 * BLOCK
    mask = FLEX.layout(LONG_ROW, CPU)
    listed = mask.to_dense()[0, 0].numpy().astype(bool)
    assert (listed == (plan.partial | plan.full)).all()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.no_grad()
def test_logprobs_are_those_of_the_oracle(architecture: str) -> None:
    flex = tiny_policy(architecture, attention="agentrl_flex")
    oracle = tiny_policy(architecture, attention=DENSE_ATTENTION)
    for row in ROWS:
        found, expected = target_logprobs(flex, row).logprobs, target_logprobs(oracle, row).logprobs
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_chunks_say_the_same_as_the_whole_row() -> None:
    policy = tiny_policy(attention="agentrl_flex")
    found = ChunkedPass(policy, ROWS[0], num_chunks=5).forward().logprobs
    with torch.no_grad():
        expected = target_logprobs(policy, ROWS[0]).logprobs
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.no_grad()
def test_the_kernel_gets_all_in_the_precision_of_autocast(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: set[torch.dtype] = set()

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        met.update(states.dtype for states in (query, key, value))
        return flex_attention(query, key, value, **options)

    monkeypatch.setattr("agentrl.models.attention.flex.flex_attention", noted)
    policy = tiny_policy(architecture, torch.float32, attention="agentrl_flex")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target_logprobs(policy, ROWS[0])
    assert met == {torch.bfloat16}


def test_training_on_cpu_is_refused(tmp_path: Path) -> None:
    tiny_policy().model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="CUDA only"):
        load_policy(tmp_path, attention="agentrl_flex")

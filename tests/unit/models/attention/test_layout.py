import numpy as np
import pytest
from harness.trees import random_group
from support.dense_attention import visibility

from agentrl.data.rows import Merge, TokenTree, empty_row
from agentrl.models.attention.layout import attention_layout
from agentrl.models.rows.row_tree import segment_starts


@pytest.mark.parametrize("max_block", [3, None])
@pytest.mark.parametrize("merge", ["tree", "linear", "none"])
def test_blocks_list_exactly_the_visible_keys(merge: Merge, max_block: int | None) -> None:
    row = TokenTree.from_tokens(random_group(5).turns, merge=merge).row
    layout = attention_layout(row, max_block=max_block)
    found = np.zeros((row.num_tokens, row.num_tokens), dtype=bool)
    query = used = 0
    for num_queries, num_keys in zip(layout.query_lengths, layout.key_lengths, strict=True):
        assert max_block is None or num_queries in (num_keys, *range(max_block + 1))
        keys = layout.key_index[used : used + num_keys]
        for offset in range(num_queries):
            found[query + offset, keys[: num_keys - num_queries + offset + 1]] = True
        query, used = query + num_queries, used + num_keys
    assert query == row.num_tokens
    assert (found == visibility(row)).all()


def test_a_chain_of_turns_is_one_segment() -> None:
    row = TokenTree.from_tokens(random_group(1, num_records=1, num_turns=1).turns).row
    assert segment_starts(row).tolist() == [0]


def test_empty_row_has_one_block_of_one_token() -> None:
    layout = attention_layout(empty_row())
    assert (layout.query_lengths, layout.key_lengths) == ((1,), (1,))

"""Rows cut into segments: every token's output once, every segment on its path, few rounds."""

import numpy as np
import pytest
from harness.tiny_families import tiny_model
from harness.trees import gradient, random_group, relative_error
from tree_workloads import Workload, make_groups

from agentrl.data import SelectedGroup
from agentrl.data.batch import build_step
from agentrl.data.rows import PackedRow
from agentrl.models.attention.attention_registry import TREE_ATTENTION
from agentrl.models.load import wrap_policy
from agentrl.models.rows import row_tree
from agentrl.models.rows.row_tree import RowTree

GROUPS = [random_group(seed, num_records=3, num_turns=3) for seed in range(2)]
SHORT_ANSWERS = make_groups(Workload(4, 16, 90, 2, 10, 4))


def row_of(groups: list[SelectedGroup]) -> PackedRow:
    (batch,) = build_step(groups, policy_version=0, token_budget=10**7).micro_batches[0]
    return batch.row


def paths(tree: RowTree) -> list[list[int]]:
    """Return the tokens that led to the state after each token of each round."""
    known: list[list[int]] = [[]]
    for one in tree.rounds:
        known += [
            known[parent] + [token for token in tokens if token < len(tree.parents)]
            for parent, tokens in zip(one.parents, one.tokens.tolist(), strict=True)
        ]
    return known


@pytest.mark.parametrize("longest", [0, 2, 16])
@pytest.mark.parametrize("groups", [GROUPS, SHORT_ANSWERS], ids=["random", "short answers"])
def test_every_segment_follows_its_path(
    groups: list[SelectedGroup], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tree, "_LONGEST_STUB", longest)
    row = row_of(groups)
    tree = RowTree.of(row)
    found = np.concatenate([one.tokens.ravel()[one.outputs] for one in tree.rounds])
    assert sorted(found.tolist()) == list(range(row.num_tokens))
    for path in paths(tree)[1:]:
        expected = [path[-1]]
        while tree.parents[expected[0]] >= 0:
            expected.insert(0, int(tree.parents[expected[0]]))
        assert path == expected
    copies = sum((one.tokens < row.num_tokens).sum() for one in tree.rounds) - row.num_tokens
    assert (copies > 0) == (longest > 0)


def test_chance_prefixes_of_answers_add_no_rounds() -> None:
    """With 16 groups, some answers of a group begin with the same of 640 tokens."""
    row = row_of(make_groups(Workload(16, 16, 100, 1, 50, 1)))
    tree = RowTree.of(row)
    assert (np.bincount(tree.parents[tree.parents >= 0]) > 1).sum() > 16
    assert len(tree.rounds) == 2


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "nemotron_h", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_copied_stubs_leave_the_gradient(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model)
    for token_budget in (10**6, 12):
        step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
        found = []
        for longest in (0, 2, 16):
            monkeypatch.setattr(row_tree, "_LONGEST_STUB", longest)
            found.append(gradient(policy, step, kind="REINFORCE")[1])
        assert max(relative_error(one, found[0]) for one in found[1:]) <= 1e-12

"""Merged training is exact on whatever trees hypothesis thinks of."""

import numpy as np
import pytest
import torch
from harness.random_groups import MAX_BACK, MOVES, group_of_moves
from harness.trees import (
    VOCABULARY,
    gradient,
    num_chunked,
    random_group,
    relative_error,
    tiny_policy,
)
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.separate import sampled_by, separate_gradient

from agentrl.data.batch import StepBatch, build_step
from agentrl.data.rows import Merge, TokenTree
from agentrl.data.select import SelectedGroup

torch.set_num_threads(1)
MAX_RECORDS, MAX_TURNS = 8, 20
ARCHITECTURES = ("qwen3", "llama")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)

moves = st.tuples(st.sampled_from(MOVES), st.integers(1, MAX_BACK))
groups = st.builds(
    lambda seed, records: group_of_moves(
        np.random.default_rng(seed), records, vocabulary=VOCABULARY
    ),
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(moves, max_size=MAX_TURNS - 1), min_size=1, max_size=MAX_RECORDS),
)
FULL_SIZE = random_group(1, num_records=MAX_RECORDS, num_turns=MAX_TURNS)


def packings(group: SelectedGroup) -> dict[str, StepBatch]:
    """Whole trees, linear merges, bins that repeat prefixes (v1), and chunks (v2)."""
    longest = max(len(turn.path) for turn in group.turns)
    merged: dict[str, tuple[Merge, int]] = {
        "tree": ("tree", 10**9),
        "linear": ("linear", 10**9),
        "bins": ("tree", longest),
        "chunks": ("tree", max(1, longest // 3)),
    }
    return {
        name: build_step([group], policy_version=3, token_budget=token_budget, merge=merge)
        for name, (merge, token_budget) in merged.items()
    }


def check(architecture: str, group: SelectedGroup) -> None:
    for dtype, bound in BOUNDS.items():
        policy = tiny_policy(architecture, dtype)
        (near,) = sampled_by(policy, [group])
        _, expected = separate_gradient(policy, [near])
        for name, batch in packings(near).items():
            error = relative_error(gradient(policy, batch)[1], expected)
            assert error <= bound, (name, dtype)


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
@settings(max_examples=4, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(group=groups)
@example(group=FULL_SIZE)
def test_merged_gradients_are_those_of_separate_turns(
    architecture: str, group: SelectedGroup
) -> None:
    check(architecture, group)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(group=groups)
def test_merged_gradients_are_those_of_separate_turns_at_length(
    architecture: str, group: SelectedGroup
) -> None:
    check(architecture, group)


def test_the_full_size_has_all_that_makes_trees_branch() -> None:
    turns = FULL_SIZE.turns
    assert len(FULL_SIZE.record_ids) == MAX_RECORDS
    assert len(turns) == MAX_RECORDS * MAX_TURNS
    sampled: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    for turn in turns:
        for place, version in enumerate(turn.versions.tolist()):
            prefix = tuple(turn.full_ids[: turn.num_prompt_tokens + place + 1].tolist())
            sampled.setdefault(prefix, []).append((turn.advantage, version))
    shared = [facts for facts in sampled.values() if len(facts) > 1]
    assert any(len({advantage for advantage, _ in facts}) > 1 for facts in shared)
    assert any(len({version for _, version in facts}) > 1 for facts in shared)
    tree, linear, flat = (
        TokenTree.from_tokens(turns, merge=merge).num_tokens for merge in ("tree", "linear", "none")
    )
    assert tree < 0.5 * flat
    assert tree < linear < flat
    assert num_chunked(packings(FULL_SIZE)["chunks"]) > 1


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_merging_costs_no_precision_in_bfloat16(architecture: str) -> None:
    # As in training: weights in float32, which bfloat16 can hold here, computation in bfloat16.
    rounded = tiny_policy(architecture, torch.bfloat16).float()
    exact = tiny_policy(architecture, torch.float64)
    exact.load_state_dict({name: value.double() for name, value in rounded.state_dict().items()})
    # Rounding must not decide what is dropped: a loss without clipping, ratios far from bounds.
    groups = sampled_by(exact, [*map(random_group, range(2)), FULL_SIZE], noise=0.05)
    for group in groups:
        _, oracle = separate_gradient(exact, [group], kind="REINFORCE")
        _, found = separate_gradient(rounded, [group], kind="REINFORCE", autocast=BFLOAT16)
        separate = relative_error(found.double(), oracle)
        assert 1e-3 < separate < 0.2
        for name, batch in packings(group).items():
            _, found = gradient(rounded, batch, kind="REINFORCE", autocast=BFLOAT16)
            assert relative_error(found.double(), oracle) <= 1.5 * separate, name

"""Errors that layers for token trees could have: each moves the gradient far from the model's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.tiny_families import tiny_model
from harness.trees import gradient, random_group, relative_error
from torch.nn.functional import pad

from agentrl.data.batch import build_step
from agentrl.models.attention.attention_registry import TREE_ATTENTION, with_own_attention
from agentrl.models.attention.backend import RowContext
from agentrl.models.attention.segments import _PartialAttention
from agentrl.models.load import wrap_policy
from agentrl.models.recurrent import scan
from agentrl.models.rows import row_tree
from agentrl.models.rows.chunk_states import ChunkStates, RowStates, TokenValues
from agentrl.models.rows.row_tree import RowTree

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*falling back to its reference PyTorch implementation"
)
GROUPS = [random_group(seed, num_records=3, num_turns=3) for seed in range(2)]
WHOLE, IN_CHUNKS = 10**6, 12
Plant = Callable[[pytest.MonkeyPatch], None]


def error(family: str, token_budget: int, plant: Plant | None, patch: pytest.MonkeyPatch) -> float:
    """Relative error of the merged gradient with a bug in place."""
    model = tiny_model(family)
    model.set_attn_implementation(TREE_ATTENTION)
    policy = wrap_policy(model)
    with with_own_attention(model):
        alone = build_step(GROUPS, policy_version=3, token_budget=1, merge="none")
        _, expected = gradient(policy, alone, kind="REINFORCE")
    if plant is not None:
        plant(patch)
    step = build_step(GROUPS, policy_version=3, token_budget=token_budget)
    return relative_error(gradient(policy, step, kind="REINFORCE")[1], expected)


def window_one_off(patch: pytest.MonkeyPatch) -> None:
    layout = RowContext.layout
    patch.setattr(
        RowContext,
        "layout",
        lambda self, window: layout(self, None if window is None else window + 1),
    )


def sink_forgotten_in_a_branch(patch: pytest.MonkeyPatch) -> None:
    add_sinks = _PartialAttention.add_sinks

    def add_some_sinks(self: _PartialAttention, sinks: torch.Tensor) -> None:
        output, normalizers = self.output[:, :, -5:].clone(), self.normalizers[:, :, -5:].clone()
        add_sinks(self, sinks)
        self.output[:, :, -5:], self.normalizers[:, :, -5:] = output, normalizers

    patch.setattr(_PartialAttention, "add_sinks", add_some_sinks)


def cap_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "tanh", lambda scores: scores)


def of_trees(change: Callable[[RowTree], RowTree]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        made = RowTree.of
        patch.setattr(RowTree, "of", lambda *arguments: change(made(*arguments)))

    return plant


def states_of_siblings(tree: RowTree) -> RowTree:
    rounds = [replace(one, parents=np.roll(one.parents, 1)) for one in tree.rounds]
    return replace(tree, rounds=tuple(rounds))


def neighbours_in_the_row(tree: RowTree) -> RowTree:
    num_tokens = len(tree.parents)
    return replace(tree, parents=np.arange(num_tokens) + tree.num_above - 1)


def detached_state(patch: pytest.MonkeyPatch) -> None:
    with_initial_state = scan._with_initial_state
    patch.setattr(scan, "_with_initial_state", lambda states: with_initial_state(states).detach())


def padding_that_moves_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan, "pad", lambda tensor, sides: pad(tensor, sides, value=0.5))


def convolution_cut_at_a_chunk(patch: pytest.MonkeyPatch) -> None:
    extend = ChunkStates.extend

    def extend_attention(self: ChunkStates, place: Any, *values: torch.Tensor) -> TokenValues:
        found = extend(self, place, *values)
        if place[0] == "attention" or not self.num_above:
            return found
        return tuple(
            torch.cat([v[:, :, : self.num_above] * 0, v[:, :, self.num_above :]], 2) for v in found
        )

    patch.setattr(ChunkStates, "extend", extend_attention)


def gradients_of_states_forgotten(patch: pytest.MonkeyPatch) -> None:
    states_above = RowStates.states_above

    def detached(self: RowStates, *place: Any) -> torch.Tensor | None:
        states = states_above(self, *place)
        return None if states is None else states.detach()

    patch.setattr(RowStates, "states_above", detached)


BUGS: dict[str, tuple[str, int, Plant]] = {
    "window one off": ("mistral_windowed", WHOLE, window_one_off),
    "window one off in chunks": ("mistral_windowed", IN_CHUNKS, window_one_off),
    "sink forgotten in a branch": ("gpt_oss", WHOLE, sink_forgotten_in_a_branch),
    "cap forgotten": ("gemma2", WHOLE, cap_forgotten),
    "state of the sibling": ("nemotron_h", WHOLE, of_trees(states_of_siblings)),
    "convolution of the row's neighbour": ("lfm2", WHOLE, of_trees(neighbours_in_the_row)),
    "detached initial state": ("nemotron_h", WHOLE, detached_state),
    "padding that moves the state": ("nemotron_h", WHOLE, padding_that_moves_the_state),
    "convolution cut at a chunk": ("lfm2", IN_CHUNKS, convolution_cut_at_a_chunk),
    "gradient of a state lost at a chunk": ("nemotron_h", IN_CHUNKS, gradients_of_states_forgotten),
}


@pytest.mark.parametrize(("family", "token_budget", "plant"), BUGS.values(), ids=BUGS)
def test_a_planted_bug_shows(
    family: str, token_budget: int, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise, segments as short as these are copied to their children: no state passes.
    monkeypatch.setattr(row_tree, "_LONGEST_STUB", 0)
    assert error(family, token_budget, plant, monkeypatch) > 1e-3


@pytest.mark.slow  # test_families.py says it more sharply
@pytest.mark.parametrize("family", ["mistral_windowed", "gpt_oss", "gemma2", "nemotron_h", "lfm2"])
@pytest.mark.parametrize("token_budget", [WHOLE, IN_CHUNKS])
def test_without_a_bug_nothing_shows(
    family: str, token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(family, token_budget, None, monkeypatch) < 1e-5

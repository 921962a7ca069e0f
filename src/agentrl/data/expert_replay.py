"""The experts that the servers chose for each token of a turn, assembled from the stored turns.

A turn stores the experts of the tokens that its own call computed; those of its prefix belong to
its ancestors. Turns of a group share tokens, but their servers may have chosen differently: then
one choice must win, because the trainer computes a shared token once.

Shape legend: P prompt tokens, T sampled tokens, W = layers * experts per token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from agentrl.data.tokens import TurnTokens
from agentrl.schema import DispatchedSamplingTask, num_shared_ids
from agentrl.schema.routed_experts import first_routed, stored_experts

OWN_CHOICE = -1
"""Marks a token whose experts are unknown; the trainer's own router chooses them."""


def with_routed_experts(
    tokens: Sequence[TurnTokens], turns: Iterable[DispatchedSamplingTask]
) -> list[TurnTokens]:
    """Attach to turns in token form the experts of all tokens on their paths.

    Args:
        tokens: results of `turn_tokens`, of any number of records.
        turns: the turns that `turn_tokens` received.
    """
    stored = {(turn.record_id, turn.index): turn for turn in turns}
    by_id = {turn.id: turn for turn in stored.values()}
    experts = {
        chain: _gather_experts(by_id[longest.turn_id], len(longest.path), stored)
        for chain, longest in _longest_turns(tokens).items()
    }
    return [_with_experts(turn, experts[turn.record_id, turn.chain]) for turn in tokens]


def agree_on_experts(turns: Sequence[TurnTokens]) -> tuple[tuple[TurnTokens, ...], int]:
    """Choose one set of experts for each token that turns of a group share.

    The first turn in depth-first order with a known choice decides, so the result does not depend
    on how the group is merged and packed.

    Returns:
        The turns in the given order, and the number of tokens whose known choice was replaced.
    """
    longest = _longest_turns(turns)
    width = max((_width(turn) for turn in longest.values()), default=0)
    if not width:
        return tuple(turns), 0
    chains = sorted(longest, key=lambda chain: longest[chain].path.astype(">u4").tobytes())
    # In this order, chains that share a token are adjacent. The forward sweep copies choices from
    # each chain to the next; the backward sweep fills in chains that precede the first known choice.
    agreed = {chain: _experts_of(longest[chain], width) for chain in chains}
    num_conflicts = 0
    for before, chain in pairwise(chains):
        shared = num_shared_ids(longest[before].path, longest[chain].path)
        num_conflicts += _adopt(agreed, chain, agreed[before][:shared])
    for after, chain in pairwise(reversed(chains)):
        shared = num_shared_ids(longest[after].path, longest[chain].path)
        _adopt(agreed, chain, agreed[after][:shared])
    return tuple(
        _with_experts(turn, agreed[turn.record_id, turn.chain]) for turn in turns
    ), num_conflicts


def _experts_of(turn: TurnTokens, width: int) -> np.ndarray:
    if turn.routed_experts is None:
        return np.full((len(turn.path), width), OWN_CHOICE, dtype=np.int16)
    return turn.routed_experts


def _adopt(
    agreed: dict[tuple[str, int], np.ndarray], chain: tuple[str, int], choices: np.ndarray
) -> int:
    """Overwrite a chain's first choices with known `choices`; return the number of conflicts."""
    own = agreed[chain][: len(choices)]
    differs = (choices != own).any(axis=1) & (choices[:, 0] != OWN_CHOICE)
    if not differs.any():
        return 0
    # Copy, because the stored arrays are shared with other turns.
    adopted = np.where(differs[:, None], choices, own)
    agreed[chain] = np.concatenate([adopted, agreed[chain][len(choices) :]])
    return int((differs & (own[:, 0] != OWN_CHOICE)).sum())


def _longest_turns(turns: Iterable[TurnTokens]) -> dict[tuple[str, int], TurnTokens]:
    """Return each chain's longest turn; the other turns' paths are prefixes of its path."""
    longest: dict[tuple[str, int], TurnTokens] = {}
    for turn in turns:
        previous = longest.get((turn.record_id, turn.chain))
        if previous is None or len(previous.path) < len(turn.path):
            longest[turn.record_id, turn.chain] = turn
    return longest


def _gather_experts(
    turn: DispatchedSamplingTask,
    length: int,
    stored: dict[tuple[str, int], DispatchedSamplingTask],
) -> np.ndarray | None:
    """Collect the experts of a turn's first tokens from the turn and its ancestors.

    Returns:
        int16 [length, W], `OWN_CHOICE` where unknown; None if no turn on the path stores any.
    """
    experts: np.ndarray | None = None
    end = length
    while True:
        first, own = first_routed(turn.shared_len), stored_experts(turn)
        if own is not None and end > first:
            if experts is None:
                experts = np.full((length, own.shape[1]), OWN_CHOICE, dtype=np.int16)
            experts[first:end] = own[: end - first]
        end = min(end, first)
        if end == 0 or turn.parent is None:
            return experts
        turn = stored[turn.record_id, turn.parent]


def _with_experts(turn: TurnTokens, experts: np.ndarray | None) -> TurnTokens:
    return replace(turn, routed_experts=None if experts is None else experts[: len(turn.path)])


def _width(turn: TurnTokens) -> int:
    return 0 if turn.routed_experts is None else turn.routed_experts.shape[1]

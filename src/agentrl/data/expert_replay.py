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
        chain: _gather(by_id[longest.turn_id], len(longest.path), stored)
        for chain, longest in _longest_of_chains(tokens).items()
    }
    return [_with(turn, experts[turn.record_id, turn.chain]) for turn in tokens]


def agree_on_experts(turns: Sequence[TurnTokens]) -> tuple[tuple[TurnTokens, ...], int]:
    """Choose one set of experts for each token that turns of a group share.

    The first turn in depth-first order with a known choice decides, so the result does not depend
    on how the group is merged and packed.

    Returns:
        The turns in the given order, and the number of tokens whose known choice was replaced.
    """
    longest = _longest_of_chains(turns)
    width = max((_width(turn) for turn in longest.values()), default=0)
    if not width:
        return tuple(turns), 0
    chains = sorted(longest, key=lambda chain: longest[chain].path.astype(">u4").tobytes())
    # In this order, chains that share a token are adjacent. The forward sweep copies choices from
    # each chain to the next; the backward sweep fills in chains that precede the first known choice.
    settled = {chain: _known(longest[chain], width) for chain in chains}
    num_conflicts = 0
    for before, chain in pairwise(chains):
        shared = num_shared_ids(longest[before].path, longest[chain].path)
        num_conflicts += _take_over(settled, chain, settled[before][:shared])
    for after, chain in pairwise(reversed(chains)):
        shared = num_shared_ids(longest[after].path, longest[chain].path)
        _take_over(settled, chain, settled[after][:shared])
    return tuple(_with(turn, settled[turn.record_id, turn.chain]) for turn in turns), num_conflicts


def _known(turn: TurnTokens, width: int) -> np.ndarray:
    if turn.routed_experts is None:
        return np.full((len(turn.path), width), OWN_CHOICE, dtype=np.int16)
    return turn.routed_experts


def _take_over(
    settled: dict[tuple[str, int], np.ndarray], chain: tuple[str, int], given: np.ndarray
) -> int:
    """Overwrite a chain's first choices with those given, where known; return the contradictions."""
    own = settled[chain][: len(given)]
    is_other = (given != own).any(axis=1) & (given[:, 0] != OWN_CHOICE)
    if not is_other.any():
        return 0
    # A copy: the samplers' arrays are shared with other turns.
    first = np.where(is_other[:, None], given, own)
    settled[chain] = np.concatenate([first, settled[chain][len(given) :]])
    return int((is_other & (own[:, 0] != OWN_CHOICE)).sum())


def _longest_of_chains(turns: Iterable[TurnTokens]) -> dict[tuple[str, int], TurnTokens]:
    """Return the turn of every chain whose path contains the paths of the others as prefixes."""
    longest: dict[tuple[str, int], TurnTokens] = {}
    for turn in turns:
        known = longest.get((turn.record_id, turn.chain))
        if known is None or len(known.path) < len(turn.path):
            longest[turn.record_id, turn.chain] = turn
    return longest


def _gather(
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


def _with(turn: TurnTokens, experts: np.ndarray | None) -> TurnTokens:
    return replace(turn, routed_experts=None if experts is None else experts[: len(turn.path)])


def _width(turn: TurnTokens) -> int:
    return 0 if turn.routed_experts is None else turn.routed_experts.shape[1]

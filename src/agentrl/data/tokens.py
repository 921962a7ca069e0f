"""`TurnTokens`: a turn as the trainer sees it: its whole prompt and reply as token ids.

Turns are stored as additions to their parents; here their full prompts are restored. Turns that
extend each other are views into one array, so the memory of a record grows with its tokens rather
than with tokens times turns. Works on arrays, independent of the store.

A turn stores the experts of the tokens that its own call computed; those of its prefix belong to
its ancestors. Turns of a group share tokens, but their servers may have chosen differently: then
one choice must win, because the trainer computes a shared token once.

Shape legend: P prompt tokens, T sampled tokens, W = layers * experts per token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from agentrl.data.shown_images import ImageBook, PlacedImage, ShownImage, expanded, processor_key
from agentrl.schema import DispatchedSamplingTask, num_shared_ids, rebuild_full_ids, token_versions
from agentrl.schema.routed_experts import first_routed, stored_experts

OWN_CHOICE = -1
"""Marks a token whose experts are unknown; the trainer's own router chooses them."""


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """One model call in token form. P prompt tokens, T sampled tokens; both at least 1."""

    turn_id: str
    record_id: str
    chain: int
    """Turns of a record with the same chain extend each other: of any two, one's path is a prefix
    of the other's."""
    full_ids: np.ndarray
    """int32 [P + T], the prompt as the model read it, images at their full length, and the tokens as
    sampled."""
    num_prompt_tokens: int
    """P."""
    behavior_logprobs: np.ndarray
    """float32 [T], after temperature."""
    versions: np.ndarray
    """int32 [T], policy version that sampled each token; `NO_VERSION` if unknown."""
    temperature: float = 1.0
    advantage: float = 0.0
    """That of every sampled token; the mean if `token_advantages` differ."""
    token_advantages: np.ndarray | None = None
    """float64 [T], with teachers in the advantage."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [T, K] of the K teachers of `--teachers`, at temperature 1; None without teachers."""
    routed_experts: np.ndarray | None = None
    """int16 [P + T - 1, W], experts that the server chose for each token of the path, see
    `with_routed_experts`; None if the server did not return them."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt, in order."""

    @property
    def num_targets(self) -> int:
        """T: every sampled token is one target token."""
        return len(self.full_ids) - self.num_prompt_tokens

    @property
    def prompt_ids(self) -> np.ndarray:
        """The prompt, int32 [P]."""
        return self.full_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> np.ndarray:
        """The sampled tokens, int32 [T]."""
        return self.full_ids[self.num_prompt_tokens :]

    @property
    def path(self) -> np.ndarray:
        """The tokens that the model reads for this turn, int32 [P + T - 1].

        The last sampled token is excluded: nothing in this turn is predicted from it. It becomes
        part of a path if a later turn continues this one.
        """
        return self.full_ids[:-1]


def turn_tokens(
    turns: Iterable[DispatchedSamplingTask], images: ImageBook | None = None
) -> list[TurnTokens]:
    """Return the trainable turns of any number of records, record by record.

    Turns of an untrained model and turns without a sampled token are not returned. They must be
    passed nevertheless, because later prompts are stored as additions to them. Turns with an image
    that `images` lacks are not returned either.

    Args:
        turns: all turns of one attempt of each record, in any order.
        images: those that the turns show and that can be read.

    Raises:
        ValueError: a turn is missing, has no prompt, shares more tokens than its parent has, or has
            more or fewer placeholders than images.
    """
    ordered = sorted(turns, key=lambda turn: (turn.record_id, turn.index))
    return [
        tokens
        for _, of_record in groupby(ordered, key=lambda turn: turn.record_id)
        for tokens in _record_tokens(list(of_record), images or ImageBook())
    ]


def _record_tokens(turns: Sequence[DispatchedSamplingTask], book: ImageBook) -> list[TurnTokens]:
    stored = rebuild_full_ids(turns)
    lengths = [len(ids) for ids in stored]
    chains, extended_by = _chains(turns, lengths)
    places = _image_places(turns, book)
    full: dict[int, np.ndarray] = {}
    images: dict[int, tuple[PlacedImage, ...]] = {}
    # In reverse order, so that a turn's extension is built before the turn, which is a view of it.
    for index in reversed(range(len(turns))):
        extension, own_places = extended_by.get(index), places[index]
        if own_places is None:
            continue
        if extension in full and turns[extension].shared_len == lengths[index]:
            num_more = sum(image.num_tokens - 1 for _, image in own_places)
            full[index] = full[extension][: lengths[index] + num_more]
            images[index] = images[extension][: len(own_places)]
        else:
            full[index], images[index] = expanded(stored[index], own_places)
    return [
        _to_turn_tokens(turn, chains[turn.index], full[turn.index], images[turn.index])
        for turn in turns
        if turn.trainable and len(turn.output_ids) and turn.index in full
    ]


def _image_places(
    turns: Sequence[DispatchedSamplingTask], book: ImageBook
) -> list[list[tuple[int, ShownImage]] | None]:
    """Return the placeholders and images of every turn; None if an image of it cannot be read."""
    places: list[list[tuple[int, ShownImage]] | None] = []
    for turn in turns:
        before = places[turn.parent] if turn.parent is not None and turn.shared_images else []
        key = processor_key(turn.image_processor) if turn.added_images else ""
        added = [book.images.get((address, key)) for address in turn.added_images]
        if before is None or None in added:
            places.append(None)
            continue
        ids = np.flatnonzero(turn.added_ids == turn.image_placeholder) if added else ()
        if len(ids) != len(added):
            raise ValueError(f"turn {turn.id} has {len(ids)} placeholders for {len(added)} images")
        readable = [image for image in added if image is not None]
        places.append(
            before[: turn.shared_images]
            + [(turn.shared_len + int(i), image) for i, image in zip(ids, readable, strict=True)]
        )
    return places


def _chains(
    turns: Sequence[DispatchedSamplingTask], lengths: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """Return the chain of every turn, and the turn that extends each extended turn.

    A turn is extended by the first later turn that contains its whole path. The last sampled token
    is not part of the path, so a prompt that drops it (an end-of-turn token) still extends it.
    """
    chains: list[int] = []
    extended_by: dict[int, int] = {}
    for turn in turns:
        parent = turn.parent
        if (
            parent is not None
            and parent not in extended_by
            and turn.shared_len >= lengths[parent] - 1
        ):
            extended_by[parent] = turn.index
            chains.append(chains[parent])
        else:
            chains.append(turn.index)
    return chains, extended_by


def _to_turn_tokens(
    turn: DispatchedSamplingTask,
    chain: int,
    full_ids: np.ndarray,
    images: tuple[PlacedImage, ...],
) -> TurnTokens:
    num_prompt_tokens = len(full_ids) - len(turn.output_ids)
    if num_prompt_tokens == 0:
        raise ValueError(f"turn {turn.id} has no prompt")
    if len(turn.output_logprobs) != len(turn.output_ids):
        raise ValueError(
            f"turn {turn.id} has {len(turn.output_ids)} tokens "
            f"and {len(turn.output_logprobs)} logprobs"
        )
    return TurnTokens(
        turn_id=turn.id,
        record_id=turn.record_id,
        chain=chain,
        full_ids=full_ids,
        num_prompt_tokens=num_prompt_tokens,
        behavior_logprobs=turn.output_logprobs,
        versions=token_versions(turn),
        # At temperature 0 (greedy) servers return the logprobs of the undivided logits.
        temperature=turn.sampling_params.temperature or 1.0,
        images=images,
    )


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
    """Choose one set of experts for each token that turns of a step share.

    The first turn in depth-first order with a known choice decides, so the result does not depend
    on how the step is merged and packed.

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

"""`TurnTokens`: a turn as the trainer sees it: its whole prompt and reply as token ids.

Turns are stored as additions to their parents; here their full prompts are restored. Turns that
extend each other are views into one array, so the memory of a record grows with its tokens rather
than with tokens times turns. Works on arrays, independent of the store.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from agentrl.data.shown_images import (
    ImageBook,
    PlacedImage,
    ShownImage,
    expanded,
    processor_key,
)
from agentrl.schema import DispatchedSamplingTask, rebuild_full_ids, token_versions


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
    routed_experts: np.ndarray | None = None
    """int16 [P + T - 1, W], experts that the server chose for each token of the path, see
    `data.expert_replay`; None if the server did not return them."""
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

"""What a teacher is asked about a record: few sequences that hold the sampled tokens of all turns.

Turns that extend each other are one sequence, so a conversation costs one forward pass, however many
turns it has. Works on arrays, independent of servers and the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.schema import DispatchedSamplingTask, rebuild_full_ids
from agentrl.schema.turn import rebuild_images


@dataclass(frozen=True, eq=False)
class TaughtSequence:
    """One sequence, and where the sampled tokens of some turns are in it."""

    ids: np.ndarray
    """int32 [N]."""
    places: dict[str, tuple[int, int]]
    """Turn id -> half-open range of its sampled tokens; none begins at 0."""

    @property
    def start(self) -> int:
        """Position of the last token before all sampled ones."""
        return min(first for first, _ in self.places.values()) - 1

    def by_turn(self, logprobs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the logprobs of each turn's sampled tokens from those of the tokens after `start`."""
        offset = self.start + 1
        return {
            turn_id: logprobs[first - offset : last - offset]
            for turn_id, (first, last) in self.places.items()
        }


def lessons(turns: Sequence[DispatchedSamplingTask]) -> list[TaughtSequence]:
    """Return the sequences of a record, longest first.

    Turns without a prompt or a sampled token, turns of untrained models, and turns that show images,
    which teachers cannot read, are in none.
    """
    found: list[TaughtSequence] = []
    images = rebuild_images(turns)
    candidates = [
        (ids, turn)
        for ids, turn, shown in zip(rebuild_full_ids(turns), turns, images, strict=True)
        if turn.trainable and 0 < len(turn.output_ids) < len(ids) and not shown
    ]
    for ids, turn in sorted(candidates, key=lambda one: -len(one[0])):
        place = (len(ids) - len(turn.output_ids), len(ids))
        extension = next((one for one in found if np.array_equal(one.ids[: len(ids)], ids)), None)
        if extension is None:
            found.append(TaughtSequence(ids, {turn.id: place}))
        else:
            extension.places[turn.id] = place
    return found

"""Random groups with every kind of branching, as input for checks of merged training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from agentrl.data.select import SelectedGroup
from agentrl.data.shown_images import ImageBook, ShownImage, processor_key
from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.schema import DispatchedSamplingTask, SamplingParams, VersionSpan, task_of_record

Move = Literal["grow", "edit", "strip", "tools", "sub-agent"]
"""How a turn's context derives from an earlier one: `grow` appends to it; `edit` replaces its end;
`strip` removes the first token of the reply, as templates remove thinking; `tools` replaces the head
of the prompt; `sub-agent` starts an unrelated context."""
MOVES: tuple[Move, ...] = get_args(Move)
MAX_BACK = 2
"""A turn derives from one of this many turns before it."""
_VERSIONS = (2, 3)
_PROMPT_TOKENS = 6
# Most turns of real rollouts continue their context.
_MOVE_PROBABILITIES = (3 / 7, 1 / 7, 1 / 7, 1 / 7, 1 / 7)


def random_group(
    rng: np.random.Generator,
    *,
    vocabulary: int,
    num_records: int = 8,
    num_turns: int = 20,
    task_id: str = "random/0",
    images: Sequence[ShownImage] = (),
) -> SelectedGroup:
    """Return a group whose records share a prompt and then diverge.

    Args:
        rng: source of all randomness.
        vocabulary: token ids are below this, except those of images.
        num_records: records of the group.
        num_turns: turns of each.
        task_id: name of the group.
        images: shown in some of the prompts.
    """
    moves = [
        [
            (
                MOVES[rng.choice(len(MOVES), p=_MOVE_PROBABILITIES)],
                int(rng.integers(1, MAX_BACK + 1)),
            )
            for _ in range(num_turns - 1)
        ]
        for _ in range(num_records)
    ]
    return group_of_moves(rng, moves, vocabulary=vocabulary, task_id=task_id, images=images)


def group_of_moves(
    rng: np.random.Generator,
    moves: Sequence[Sequence[tuple[Move, int]]],
    *,
    vocabulary: int,
    task_id: str = "random/0",
    images: Sequence[ShownImage] = (),
) -> SelectedGroup:
    """Return a group whose records make the given moves.

    Outputs start with tokens from a small vocabulary: records then share sampled tokens, which
    carry several advantages, versions and logprobs.

    Args:
        rng: draws tokens, logprobs, temperatures, versions and advantages.
        moves: for each record and each of its turns after the first: the move, and the distance (in
            turns) to the turn from which it derives.
        vocabulary: token ids are below this.
        task_id: name of the group.
        images: see `random_group`.
    """
    book = ImageBook(
        {(str(number), processor_key({})): image for number, image in enumerate(images)}
    )
    prompt = rng.integers(0, vocabulary, _PROMPT_TOKENS).tolist()
    record_ids = tuple(f"{task_id}/{number}" for number in range(len(moves)))
    turns: list[TurnTokens] = []
    for record_id, record_moves in zip(record_ids, moves, strict=True):
        record = _RandomRecord(rng, vocabulary, record_id, images)
        turns += turn_tokens(_make_turns(record, prompt, record_moves), book)
    advantages = rng.normal(size=len(turns))
    return SelectedGroup(
        task_id=task_id,
        record_ids=record_ids,
        scores=(),
        turns=tuple(
            replace(turn, advantage=advantage)
            for turn, advantage in zip(turns, advantages.tolist(), strict=True)
        ),
    )


def random_turns(
    rng: np.random.Generator,
    record_id: str,
    prompt: Sequence[int],
    moves: Sequence[tuple[Move, int]],
    vocabulary: int,
) -> list[DispatchedSamplingTask]:
    """Return the turns of one record; arguments as of `group_of_moves`."""
    return _make_turns(_RandomRecord(rng, vocabulary, record_id), prompt, moves)


def _make_turns(
    record: "_RandomRecord", prompt: Sequence[int], moves: Sequence[tuple[Move, int]]
) -> list[DispatchedSamplingTask]:
    record.add_turn(None, 0, [*prompt, *record.random_image()])
    for move, back in moves:
        record.add_turn(*record.context(move, back))
    return record.turns


class _RandomRecord:
    """Builds the turns of one record."""

    def __init__(
        self,
        rng: np.random.Generator,
        vocabulary: int,
        record_id: str,
        images: Sequence[ShownImage] = (),
    ) -> None:
        self.turns: list[DispatchedSamplingTask] = []
        # Prompt and output of every turn; -1 - k represents the k-th image.
        self._full_ids: list[list[int]] = []
        self._images = images
        self._rng = rng
        self._vocabulary = vocabulary
        self._record_id = record_id

    def add_turn(self, parent: int | None, shared: int, added: list[int]) -> None:
        """Append a turn with a random output to the given context."""
        index = len(self.turns)
        # The first tokens have few distinct values, so that samples of a group share some tokens.
        output = self._ids(1, 4, vocabulary=2) + self._ids(0, 4)
        cut = int(self._rng.integers(0, len(output) + 1))
        before = self._full_ids[parent][:shared] if parent is not None else []
        placeholder = self._images[0].image_token_id if self._images else None
        self.turns.append(
            DispatchedSamplingTask(
                id=f"{self._record_id}/1/{index}",
                record_id=self._record_id,
                task_id=task_of_record(self._record_id),
                attempt=1,
                index=index,
                parent=parent,
                shared_len=shared,
                added_ids=[placeholder if id_ < 0 else id_ for id_ in added],
                shared_images=sum(id_ < 0 for id_ in before),
                added_images=tuple(str(-1 - id_) for id_ in added if id_ < 0),
                image_placeholder=placeholder,
                output_ids=output,
                output_logprobs=(-self._rng.uniform(0.0, 5.0, len(output))).tolist(),
                version_spans=(
                    VersionSpan(version=_VERSIONS[0], start=0, end=cut),
                    VersionSpan(version=_VERSIONS[1], start=cut, end=len(output)),
                ),
                finish_reason="stop",
                sampling_params=SamplingParams(temperature=float(self._rng.choice([0.7, 1.0]))),
            )
        )
        self._full_ids.append(before + added + output)

    def context(self, move: Move, back: int) -> tuple[int | None, int, list[int]]:
        """Return parent, shared length and added ids of the next turn."""
        parent = max(0, len(self.turns) - back)
        full = self._full_ids[parent]
        if move == "grow":
            return parent, len(full), self.random_image() + self._ids(1, 4)
        if move == "edit":
            return (
                parent,
                int(self._rng.integers(1, len(full))),
                self._ids(1, 5) + self.random_image(),
            )
        if move == "strip":
            reply = self.turns[parent].output_ids.tolist()
            return parent, len(full) - len(reply), reply[1:] + self._ids(1, 3)
        if move == "tools":  # replaces the first two tokens of the prompt
            return parent, 0, self._ids(1, 3) + full[2:]
        return None, 0, self._ids(3, 6)

    def random_image(self) -> list[int]:
        """Return the ids of one randomly chosen image, or no ids."""
        drawn = int(self._rng.integers(0, 2 * len(self._images))) if self._images else 0
        return [-1 - drawn] if drawn < len(self._images) else []

    def _ids(self, low: int, high: int, *, vocabulary: int | None = None) -> list[int]:
        count = int(self._rng.integers(low, high))
        drawn: list[int] = self._rng.integers(0, vocabulary or self._vocabulary, count).tolist()
        return drawn

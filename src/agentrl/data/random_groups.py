"""Random groups with everything that makes trees branch, to check merged training with."""

from dataclasses import replace

import numpy as np

from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.schema import DispatchedSamplingTask, SamplingParams, VersionSpan

_VERSIONS = (2, 3)


def random_group(
    rng: np.random.Generator,
    *,
    vocabulary: int,
    num_records: int = 8,
    num_turns: int = 20,
    task_id: str = "random/0",
) -> SelectedGroup:
    """Return a group whose records share a prompt and then go their own ways.

    A turn grows the context of a recent one, edits it, strips the first tokens (the thinking) of
    its reply, changes the tools at the head of the prompt, or starts a sub-agent. Samples agree
    for a while, so that shared tokens carry several advantages, versions and logprobs.

    Args:
        rng: draws everything.
        vocabulary: token ids are below this.
        num_records: tries of the group.
        num_turns: turns of each.
        task_id: name of the group.
    """
    prompt = rng.integers(0, vocabulary, 6).tolist()
    turns: list[TurnTokens] = []
    for number in range(num_records):
        record = _RandomRecord(rng, vocabulary, f"{task_id}/{number}", prompt)
        for _ in range(num_turns):
            record.add_turn()
        turns += turn_tokens(record.turns)
    advantages = rng.normal(size=len(turns))
    return SelectedGroup(
        task_id=task_id,
        record_ids=tuple(f"{task_id}/{number}" for number in range(num_records)),
        scores=(),
        turns=tuple(
            replace(turn, advantage=advantage)
            for turn, advantage in zip(turns, advantages.tolist(), strict=True)
        ),
    )


class _RandomRecord:
    """A record in the making."""

    def __init__(
        self, rng: np.random.Generator, vocabulary: int, record_id: str, prompt: list[int]
    ) -> None:
        self.turns: list[DispatchedSamplingTask] = []
        self._full: list[list[int]] = []  # prompt and output of every turn
        self._rng = rng
        self._vocabulary = vocabulary
        self._record_id = record_id
        self._prompt = prompt

    def add_turn(self) -> None:
        """Append a turn after a random earlier one."""
        index = len(self.turns)
        # Few distinct first tokens: samples of a group agree for a while.
        output = self._ids(1, 4, vocabulary=2) + self._ids(0, 4)
        parent, shared, added = self._context(index)
        cut = int(self._rng.integers(0, len(output) + 1))
        self.turns.append(
            DispatchedSamplingTask(
                id=f"{self._record_id}/1/{index}",
                record_id=self._record_id,
                task_id=self._record_id.rpartition("/")[0],
                attempt=1,
                index=index,
                parent=parent,
                shared_len=shared,
                added_ids=added,
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
        before = self._full[parent][:shared] if parent is not None else []
        self._full.append(before + added + output)

    def _context(self, index: int) -> tuple[int | None, int, list[int]]:
        """Return parent, shared length and added ids of the next turn."""
        if index == 0:
            return None, 0, list(self._prompt)
        move = self._rng.choice(["grow", "grow", "grow", "edit", "strip", "tools", "sub-agent"])
        parent = int(self._rng.integers(max(0, index - 2), index))
        full = self._full[parent]
        if move == "grow":
            return parent, len(full), self._ids(1, 4)
        if move == "edit":
            return parent, int(self._rng.integers(1, len(full))), self._ids(1, 5)
        if move == "strip":
            reply = self.turns[parent].output_ids.tolist()
            return parent, len(full) - len(reply), reply[1:] + self._ids(1, 3)
        if move == "tools":  # the head of the prompt changes, all after it stays
            return parent, 0, self._ids(1, 3) + full[2:]
        return None, 0, self._ids(3, 6)

    def _ids(self, low: int, high: int, *, vocabulary: int | None = None) -> list[int]:
        count = int(self._rng.integers(low, high))
        drawn: list[int] = self._rng.integers(0, vocabulary or self._vocabulary, count).tolist()
        return drawn

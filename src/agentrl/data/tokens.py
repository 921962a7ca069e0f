"""`TurnTokens`: a turn as the trainer sees it, with its whole prompt and without text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from agentrl.schema import DispatchedSamplingTask, rebuild_prompts, token_versions


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """One model call in token form. P prompt tokens, T sampled tokens; both at least 1."""

    turn_id: str
    record_id: str
    prompt_ids: np.ndarray
    """int32 [P], as sent to the engine."""
    output_ids: np.ndarray
    """int32 [T], as sampled."""
    behavior_logprobs: np.ndarray
    """float32 [T], after temperature."""
    versions: np.ndarray
    """int32 [T], policy version that sampled each token."""
    temperature: float = 1.0
    advantage: float = 0.0

    @property
    def num_terms(self) -> int:
        """Return T: every sampled token is one loss term."""
        return len(self.output_ids)

    @property
    def path(self) -> np.ndarray:
        """Return the tokens that the model reads for this turn, int32 [P + T - 1].

        The last sampled token predicts nothing here; it is read only where a later turn goes on.
        """
        return np.concatenate([self.prompt_ids, self.output_ids[:-1]])


def turn_tokens(turns: Iterable[DispatchedSamplingTask]) -> list[TurnTokens]:
    """Return the trainable turns of any number of records, record by record.

    Turns of a model that is not trained, and turns without a sampled token, are left out; they
    are still needed here, because later prompts are stored as additions to them.

    Args:
        turns: all turns of one attempt of each record, in any order.

    Raises:
        ValueError: a turn is missing, or has no prompt.
    """
    found = []
    ordered = sorted(turns, key=lambda turn: (turn.record_id, turn.index))
    for _, of_record in groupby(ordered, key=lambda turn: turn.record_id):
        record_turns = list(of_record)
        prompts = rebuild_prompts(record_turns)
        found += [
            _tokens(turn, prompt)
            for turn, prompt in zip(record_turns, prompts, strict=True)
            if turn.trainable and len(turn.output_ids)
        ]
    return found


def _tokens(turn: DispatchedSamplingTask, prompt_ids: np.ndarray) -> TurnTokens:
    if len(prompt_ids) == 0:
        raise ValueError(f"turn {turn.id} has no prompt")
    if len(turn.output_logprobs) != len(turn.output_ids):
        raise ValueError(
            f"turn {turn.id} has {len(turn.output_ids)} tokens "
            f"and {len(turn.output_logprobs)} logprobs"
        )
    # Greedy sampling has no temperature to divide by; its logprobs are the model's own.
    temperature = turn.sampling_params.temperature or 1.0
    return TurnTokens(
        turn_id=turn.id,
        record_id=turn.record_id,
        prompt_ids=prompt_ids,
        output_ids=turn.output_ids,
        behavior_logprobs=turn.output_logprobs,
        versions=token_versions(turn),
        temperature=temperature,
    )


def shared_lengths(paths: Sequence[np.ndarray]) -> list[int]:
    """Return how many leading tokens each path shares with the one before it (0 for the first)."""
    lengths = [0]
    for before, path in pairwise(paths):
        size = min(len(before), len(path))
        differs = before[:size] != path[:size]
        lengths.append(int(differs.argmax()) if differs.any() else size)
    return lengths[: len(paths)]

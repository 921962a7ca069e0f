"""One sequence a rollout, for trainers that know prompts and completions but no trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.schema import DispatchedSamplingTask


@dataclass(frozen=True, eq=False)
class RolloutSequence:
    """A conversation as it was sampled: P tokens of its first prompt, C tokens from then on."""

    prompt_ids: np.ndarray
    """int32 [P]."""
    completion_ids: np.ndarray
    """int32 [C], what the model said and what it was told in between."""
    mask: np.ndarray
    """bool [C], True where a token carries loss."""
    logprobs: np.ndarray
    """float32 [C], of the sampled tokens when they were sampled, after temperature; else 0."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.mask.sum())


def longest_sequence(turns: Sequence[DispatchedSamplingTask]) -> RolloutSequence | None:
    """Return the conversation of a rollout with the most sampled tokens; None where none has any.

    Turns with an advantage of their own that allows no learning (calls that cannot be parsed) are
    in the sequence, but carry no loss.

    Args:
        turns: all turns of one attempt of a record.

    Raises:
        TrainingError: the rollout shows images.
    """
    muted = {turn.id for turn in turns if turn.advantage == 0.0}
    tokens = sorted(turn_tokens(turns), key=lambda turn: turn.chain)
    found = [_sequence(list(chain), muted) for _, chain in groupby(tokens, lambda t: t.chain)]
    return max(found, key=lambda sequence: sequence.num_sampled, default=None)


def _sequence(chain: Sequence[TurnTokens], muted: set[str]) -> RolloutSequence:
    whole = max(chain, key=lambda turn: len(turn.full_ids)).full_ids
    start = min(turn.num_prompt_tokens for turn in chain)
    mask = np.zeros(len(whole), dtype=np.bool_)
    logprobs = np.zeros(len(whole), dtype=np.float32)
    for turn in chain:
        if turn.turn_id in muted:
            continue
        place = slice(turn.num_prompt_tokens, len(turn.full_ids))
        # A later prompt may have replaced the token that ended a reply.
        kept = whole[place] == turn.output_ids
        mask[place] = kept
        logprobs[place] = np.where(kept, turn.behavior_logprobs, 0.0)
    return RolloutSequence(whole[:start], whole[start:], mask[start:], logprobs[start:])

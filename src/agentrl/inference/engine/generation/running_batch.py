"""`RunningBatch`: the running sequences and their rows in the cache."""

import numpy as np

from agentrl.inference.engine.generation.kv_cache import (
    MIN_PREFIX,
    KVCache,
    Prefix,
    PrefixStore,
    common_prefix,
)
from agentrl.inference.engine.generation.own_caches import OwnCaches
from agentrl.inference.engine.generation.token_sequence import TokenSequence


class RunningBatch:
    """Running sequences occupy cache rows 0, 1, ... in the order of `running`.

    The decoding ones come first, then at most one whose prompt is not yet fully computed.

    Args:
        kv: has one row per running sequence.
        prefixes: receives the cache of ended sequences.
    """

    def __init__(self, kv: KVCache | OwnCaches, prefixes: PrefixStore) -> None:
        self._kv = kv
        self._prefixes = prefixes
        self._epoch = 0
        self.running: list[TokenSequence] = []
        self.num_cached = 0
        """Prompt tokens served from the cache so far."""

    def forget_computed(self) -> None:
        """Stop reusing the cache computed so far, because the weights have changed."""
        self._epoch += 1
        self._prefixes.clear()

    def admit(self, sequence: TokenSequence, fresh: list[TokenSequence]) -> bool:
        """Give a sequence the next row, with the longest known prefix in it.

        Args:
            sequence: a waiting sequence, for whose row there is room.
            fresh: running sequences whose prompts are computed in this step.

        Returns:
            False if the sequence shares more with such a prompt: it must wait for the next step and
                copy it then.
        """
        # At least one token must be computed, to get logits.
        wanted = sequence.tokens[: sequence.length - 1]
        if sequence.prompt_logprobs_from >= 0:
            wanted = wanted[: sequence.prompt_logprobs_from]
        num_known, known = self._find_prefix(sequence.namespace, wanted)
        worth_waiting = num_known + MIN_PREFIX
        for other in fresh if self._kv.can_be_cut else ():
            if other.namespace == sequence.namespace:
                coming = other.tokens[: other.length]
                if common_prefix(coming, wanted, longer_than=worth_waiting) > worth_waiting:
                    return False
        row = len(self.running)
        self._kv.start(row)
        experts = None
        if isinstance(known, Prefix):
            self._kv.fill(row, known.kv, num_known)
            experts = known.routed_experts
        elif known is not None:
            self._kv.move(known, row, num_known)
            experts = self.running[known].routed_experts
        if sequence.routed_experts is not None and experts is not None:
            sequence.routed_experts[:num_known] = experts[:num_known]
        sequence.num_computed = num_known
        sequence.epoch = self._epoch
        if sequence.num_cached is None:
            sequence.num_cached = num_known
            self.num_cached += num_known
        self.running.append(sequence)
        return True

    def leave(self, sequence: TokenSequence, *, keep: bool = True) -> None:
        """Free the row of a running sequence, and by default keep its cache for reuse."""
        row = self.running.index(sequence)
        if keep and sequence.epoch == self._epoch and self._prefixes.keeps_any:
            count = sequence.num_computed
            known = sequence.tokens[:count]
            experts = None if sequence.routed_experts is None else sequence.routed_experts[:count]
            self._prefixes.add(sequence.namespace, known, self._kv.prefix(row, count), experts)
        sequence.forget_cache()
        last = len(self.running) - 1
        if row < last and not self.running[last].is_prefilled:
            # The sequence that is still being prefilled stays behind all decoding ones.
            last_decoding = last - 1
            if row < last_decoding:
                self._move_row(last_decoding, row)
                row = last_decoding
        if row < last:
            self._move_row(last, row)
        self.running.pop()

    def _find_prefix(self, namespace: str, wanted: np.ndarray) -> tuple[int, Prefix | int | None]:
        """Return the length and location of the longest known prefix: a kept one, or a row."""
        found: Prefix | int | None
        best, found = self._prefixes.find(
            namespace, wanted, MIN_PREFIX - 1, whole=not self._kv.can_be_cut
        )
        if not self._kv.can_be_cut:
            return (0, None) if found is None else (best, found)
        for row, other in enumerate(self.running):
            if other.epoch == self._epoch and other.namespace == namespace:
                computed = other.tokens[: other.num_computed]
                length = common_prefix(computed, wanted, longer_than=best)
                if length > best:
                    best, found = length, row
        return (0, None) if found is None else (best, found)

    def _move_row(self, source: int, target: int) -> None:
        sequence = self.running[source]
        self._kv.move(source, target, sequence.num_computed)
        self.running[target] = sequence

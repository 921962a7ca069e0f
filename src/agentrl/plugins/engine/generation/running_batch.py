"""`RunningBatch`: the running sequences and their rows in the cache."""

import numpy as np

from agentrl.plugins.engine.generation.kv_cache import (
    MIN_PREFIX,
    KVCache,
    Prefix,
    PrefixStore,
    common_prefix,
)
from agentrl.plugins.engine.generation.model_caches import ModelCaches
from agentrl.plugins.engine.generation.token_sequence import TokenSequence


class RunningBatch:
    """Running sequences occupy cache rows 0, 1, ... in the order of `running`.

    The decoding ones come first, then at most one whose prompt is not yet fully computed.
    """

    def __init__(self, kv: KVCache | ModelCaches, prefixes: PrefixStore) -> None:
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
        for sequence in self.running:
            if not sequence.is_prefilled:
                sequence.epoch = -1

    def admit(self, sequence: TokenSequence, prefilling: list[TokenSequence]) -> bool:
        """Give a sequence the next row, with the longest known prefix in it.

        Returns False if it shares more with a prompt that this step computes (`prefilling`): it
        must wait for the next step and copy it then.
        """
        # At least one token must be computed to obtain logits.
        reusable = sequence.tokens[: sequence.length - 1]
        if sequence.prompt_logprobs_from >= 0:
            reusable = reusable[: sequence.prompt_logprobs_from]
        num_reused, source = self._find_prefix(sequence.namespace, reusable)
        threshold = num_reused + MIN_PREFIX
        for other in prefilling if self._kv.can_be_cut else ():
            if other.namespace == sequence.namespace:
                other_prompt = other.tokens[: other.length]
                if common_prefix(other_prompt, reusable, longer_than=threshold) > threshold:
                    return False
        row = len(self.running)
        self._kv.start(row)
        experts = None
        if isinstance(source, Prefix):
            self._kv.fill(row, source.kv, num_reused)
            experts = source.routed_experts
        elif source is not None:
            self._kv.move(source, row, num_reused)
            experts = self.running[source].routed_experts
        if sequence.routed_experts is not None and experts is not None:
            sequence.routed_experts[:num_reused] = experts[:num_reused]
        sequence.num_computed = num_reused
        sequence.epoch = self._epoch
        if sequence.num_cached is None:
            sequence.num_cached = num_reused
            self.num_cached += num_reused
        self.running.append(sequence)
        return True

    def leave(self, sequence: TokenSequence, *, keep: bool = True) -> None:
        """Free the row of a running sequence, and by default keep its cache for reuse."""
        row = self.running.index(sequence)
        if keep and sequence.epoch == self._epoch and self._prefixes.keeps_any:
            count = sequence.num_computed
            tokens = sequence.tokens[:count]
            experts = None if sequence.routed_experts is None else sequence.routed_experts[:count]
            self._prefixes.add(sequence.namespace, tokens, self._kv.prefix(row, count), experts)
        sequence.forget_cache()
        last = len(self.running) - 1
        if row < last and not self.running[last].is_prefilled:
            # A sequence that is still being prefilled must stay behind all decoding ones.
            last_decoding = last - 1
            if row < last_decoding:
                self._move_row(last_decoding, row)
                row = last_decoding
        if row < last:
            self._move_row(last, row)
        self.running.pop()

    def _find_prefix(self, namespace: str, tokens: np.ndarray) -> tuple[int, Prefix | int | None]:
        """Return the length and location of the longest known prefix: a kept one, or a row."""
        found: Prefix | int | None
        best, found = self._prefixes.find(
            namespace, tokens, MIN_PREFIX - 1, whole=not self._kv.can_be_cut
        )
        if not self._kv.can_be_cut:
            return (0, None) if found is None else (best, found)
        for row, other in enumerate(self.running):
            if other.epoch == self._epoch and other.namespace == namespace:
                computed = other.tokens[: other.num_computed]
                length = common_prefix(computed, tokens, longer_than=best)
                if length > best:
                    best, found = length, row
        return (0, None) if found is None else (best, found)

    def _move_row(self, source: int, target: int) -> None:
        sequence = self.running[source]
        self._kv.move(source, target, sequence.num_computed)
        self.running[target] = sequence

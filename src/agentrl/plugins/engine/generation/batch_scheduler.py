"""`BatchScheduler`: continuous batching, from waiting sequences to finished ones.

Used from one thread only. `RunningBatch` decides where running sequences lie in the cache.

    submit ──> waiting ──admit──> running ──stop, length, abort──> finished
                  ^                  │
                  └─────retract──────┘   (short of memory, paused for new weights, suspect)

Sequences wait by priority, the highest first; equal ones in the order of their arrival.

If a step fails, its sequences become suspects. They are computed one by one until each
has proved harmless.

While sampling is paused, or new weights wait for the engine to be idle, new sequences are held
back and start waiting afterwards. Nothing is computed while memory is released.
"""

import bisect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.inference.wire import PauseMode
from agentrl.models.attention.attention_registry import attention_of
from agentrl.plugins.engine.generation.cached_attention import ENGINE_ATTENTION, Chunk
from agentrl.plugins.engine.generation.kv_cache import (
    CacheMemoryError,
    KVCache,
    PrefixStore,
    RowLimits,
    kv_shape,
)
from agentrl.plugins.engine.generation.memory_saver import MemorySaver
from agentrl.plugins.engine.generation.model_caches import ModelCacheRunner, ModelCaches
from agentrl.plugins.engine.generation.model_runner import ModelRunner
from agentrl.plugins.engine.generation.running_batch import RunningBatch
from agentrl.plugins.engine.generation.token_sampling import SamplingBatch
from agentrl.plugins.engine.generation.token_sequence import FinishReason, TokenSequence
from agentrl.plugins.engine.weights.live_weights import swap_weights

logger = logging.getLogger(__name__)

# A sequence is admitted only if all running sequences can grow by this many positions.
_HEADROOM = 64
_ABORTED = FinishReason("abort", message="aborted on request")


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a scheduler."""

    max_running: int
    max_queued: int
    context_length: int
    prefill_tokens_per_step: int
    kv_cache_bytes: int
    prefix_cache_bytes: int


@dataclass(frozen=True)
class SchedulerLoad:
    """How busy a scheduler is."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_prefix_tokens: int
    max_tokens: int
    token_usage: float
    """Share of the capacity that the rows of running sequences take. All rows are as long as the
    longest one, so this share decides whether another row fits.
    """


class BatchScheduler:
    """Continuous batching over one model.

    `find_stop` returns the stop string that the output of a sequence ends with, if any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        limits: SchedulerLimits,
        label: str,
        find_stop: Callable[[TokenSequence], str | None] | None = None,
    ) -> None:
        config = model.config
        self.model = model
        self.limits = limits
        self.label = label
        self._find_stop = find_stop
        self._vocab_size = int(config.get_text_config().vocab_size)
        is_plain = attention_of(model) == ENGINE_ATTENTION
        shape = kv_shape(model, is_plain=is_plain)
        self._kv: KVCache | ModelCaches
        self._runner: ModelRunner | ModelCacheRunner
        num_tokens = limits.kv_cache_bytes // shape.token_bytes
        row_limits = RowLimits(limits.max_running, limits.context_length, num_tokens)
        self.max_tokens = row_limits.max_tokens
        """Capacity for tokens of running sequences."""
        if is_plain:
            self._kv = KVCache(shape, row_limits)
            self._runner = ModelRunner(model, self._kv)
        else:
            self._kv = ModelCaches(model, row_limits)
            self._runner = ModelCacheRunner(model, self._kv)
        self._prefixes = PrefixStore(shape, limits.prefix_cache_bytes)
        self.memory = MemorySaver(model, self._kv, self._prefixes, self._runner.forget_graphs)
        self._batch = RunningBatch(self._kv, self._prefixes)
        self._running = self._batch.running
        self._waiting: list[TokenSequence] = []
        self._held_back: list[TokenSequence] = []
        self._in_flight: dict[str, TokenSequence] = {}
        self._paused: PauseMode | None = None
        self._is_draining = False
        self._awaits_weights = False
        self._sampling: SamplingBatch | None = None
        self._finished: list[TokenSequence] = []
        self._streamed: list[TokenSequence] = []
        self.num_sampled = 0

    # Queries of the loop.

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something."""
        return not self.is_halted and bool(self._running or self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._running and not self._waiting

    @property
    def is_paused(self) -> bool:
        """Whether sampling is paused."""
        return self._paused is not None

    @property
    def is_halted(self) -> bool:
        """Whether nothing can be computed: paused, memory released, or weights arriving."""
        return self.is_paused or self._awaits_weights or not self.memory.is_whole

    @property
    def num_in_flight(self) -> int:
        """Sequences that have not ended, including those held back."""
        return len(self._in_flight)

    @property
    def num_cached(self) -> int:
        """Prompt tokens served from the cache so far. May be read from any thread."""
        return self._batch.num_cached

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens computed so far. May be read from any thread."""
        return self._runner.num_prefilled

    def load(self) -> SchedulerLoad:
        """Return how busy the engine is."""
        queued = [*self._waiting, *self._held_back]
        longest = max((sequence.length for sequence in self._running), default=0)
        return SchedulerLoad(
            num_running=len(self._running),
            num_waiting=len(queued),
            num_waiting_tokens=sum(sequence.length for sequence in queued),
            num_used_tokens=sum(sequence.num_computed for sequence in self._running),
            num_prefix_tokens=self._prefixes.num_tokens,
            max_tokens=self.max_tokens,
            token_usage=min(1.0, len(self._running) * longest / self.max_tokens),
        )

    def take_events(self) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """Return sequences that ended and streams that grew since the last call."""
        events = self._finished, self._streamed
        self._finished, self._streamed = [], []
        return events

    # Commands of the front end.

    def submit_all(self, sequences: Iterable[TokenSequence]) -> None:
        """Queue the sequences of a request, or end them at once with an HTTP status."""
        sequences = list(sequences)
        if len(self._waiting) + len(self._held_back) + len(sequences) > self.limits.max_queued:
            message = f"the queue is full ({self.limits.max_queued} requests)"
            for sequence in sequences:
                sequence.finish = FinishReason("abort", message=message, status=503)
            self._finished += sequences
            return
        for sequence in sequences:
            self.submit(sequence)

    def submit(self, sequence: TokenSequence) -> None:
        """Queue one sequence."""
        if sequence.rid in self._in_flight:
            message = f"request id {sequence.rid} is in use by a live request"
            sequence.finish = FinishReason("abort", message=message, status=400)
            self._finished.append(sequence)
            return
        sequence.routed_experts = self._runner.room_for_experts(len(sequence.tokens))
        self._in_flight[sequence.rid] = sequence
        if self._paused is not None or self._is_draining:
            self._held_back.append(sequence)
        else:
            bisect.insort_right(self._waiting, sequence, key=_turn)

    def abort(self, rid: str) -> None:
        """End the sequence with this id, wherever it is; unknown ids are ignored."""
        sequence = self._in_flight.get(rid)
        if sequence is not None:
            self._abort(sequence)

    def abort_all_of(self, sequences: Iterable[TokenSequence]) -> None:
        """End those of these sequences that have not ended."""
        for sequence in sequences:
            if self._in_flight.get(sequence.rid) is sequence:
                self._abort(sequence)

    def abort_all(self) -> None:
        """End all sequences in flight; those held back at a pause stay."""
        for sequence in [*self._running, *self._waiting]:
            self._abort(sequence)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`."""
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            while self._running:
                self._retract_last()
        self._paused = mode

    def resume(self) -> None:
        """Resume sampling; harmless when not paused."""
        self._paused = None
        self._release_held_back()

    def drain(self, draining: bool) -> None:
        """Hold new sequences back until all others have ended, or stop doing so."""
        self._is_draining = draining
        self._release_held_back()

    def flush(self) -> bool:
        """Forget the prefixes of ended sequences; refused while sequences hold rows."""
        if self._running:
            return False
        self._prefixes.clear()
        return True

    def release_memory(self, tags: Sequence[str]) -> None:
        """Release memory, see `MemorySaver.release`.

        Waiting sequences may stay while sampling is paused: after a pause that retracts them, they
        continue once everything is resumed.

        Raises `InferenceError` if sequences are running, or about to run; nothing has changed then.
        """
        if self._awaits_weights:
            raise InferenceError("memory cannot be released during a weight update")
        if self._running or (self._waiting and not self.is_paused):
            raise InferenceError("only an idle server releases memory; pause it first")
        self._sampling = None
        self.memory.release(tags)

    def install(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        """Swap checked weights in."""
        self.memory.check_weights()
        self.weights_changed(label or self.label, swap_weights(self.model, tensors))

    def begin_weights(self) -> None:
        """Compute nothing until `weights_changed`, while the model's memory is being written."""
        self.memory.check_weights()
        self._awaits_weights = True

    def weights_changed(self, label: str, loaded: Iterable[torch.Tensor]) -> None:
        """Continue under a new label. Nothing computed before is used for a new sequence.

        `loaded` are the model's tensors, or parts of them, that have new values.
        """
        self._awaits_weights = False
        self.memory.note_loaded(loaded)
        self._batch.forget_computed()
        self.label = label

    # One step.

    def step(self) -> None:
        """Compute one token for every decoding sequence and the next part of prompts."""
        # New tensors lie on the GPU; on a CPU, the context would only delay every operation.
        device = self.model.device
        with nullcontext() if device.type == "cpu" else device, torch.no_grad():
            self._compute_step()

    def _compute_step(self) -> None:
        self._make_room()
        num_decoding = sum(1 for sequence in self._running if sequence.is_prefilled)
        chunks = self._prefill(num_decoding)
        if not self._running:
            return
        logits, sampled = self._runner.forward(self._running, num_decoding, chunks)
        if not sampled:
            return
        if self._sampling is None or self._sampling.sequences != sampled:
            self._sampling = SamplingBatch(sampled, self._vocab_size)
        tokens, logprobs = self._sampling.draw(logits)
        ended = []
        for sequence, token, logprob in zip(sampled, tokens, logprobs, strict=True):
            if sequence.params.max_new_tokens == 0:  # the request only scores its prompt
                sequence.finish = FinishReason("length")
                ended.append(sequence)
                continue
            sequence.append(token, logprob, self.label)
            sequence.is_suspect = False
            sequence.finish = self._finish_of(sequence, token)
            if sequence.finish is not None:
                ended.append(sequence)
            elif sequence.stream:
                self._streamed.append(sequence)
        self.num_sampled += len(tokens)
        for sequence in ended:
            self._batch.leave(sequence)
            self._end(sequence)

    def step_failed(self, error: Exception) -> None:
        """Isolate the sequences of a failed step; one that failed alone ends with an error."""
        self._sampling = None
        suspects = []
        while self._running:
            self._running[-1].is_suspect = True
            suspects.append(self._retract_last(keep=False))
        failed = suspects if len(suspects) == 1 else []
        for sequence in failed:
            self._waiting.remove(sequence)
        # A sequence that was being admitted is in no queue.
        queued = {*self._waiting, *self._held_back, *failed}
        failed += [sequence for sequence in self._in_flight.values() if sequence not in queued]
        if not failed and not suspects and self._waiting:
            failed = [self._waiting.pop(0)]  # the one that was to be admitted
        message = f"the engine cannot compute this request ({type(error).__name__}: {error})"
        for sequence in failed:
            sequence.finish = FinishReason("abort", message=message, status=500)
            self._end(sequence)

    def _finish_of(self, sequence: TokenSequence, token: int) -> FinishReason | None:
        params = sequence.params
        if token in params.stop_ids:
            return FinishReason("stop", matched=token)
        if sequence.constraint is not None:
            if sequence.constraint.fault is not None:
                return FinishReason("abort", message=sequence.constraint.fault, status=400)
            if sequence.constraint.is_over:
                return FinishReason("stop", matched=token)
        if params.stop_strings and self._find_stop is not None:
            matched = self._find_stop(sequence)
            if matched is not None:
                return FinishReason("stop", matched=matched)
        if len(sequence.output_ids) >= params.max_new_tokens:
            return FinishReason("length")
        return None

    # Composition of the batch.

    def _prefill(self, num_decoding: int) -> list[Chunk]:
        """Choose prompt tokens for this step; admit sequences while there is room."""
        budget = self.limits.prefill_tokens_per_step
        chunks: list[Chunk] = []
        for row in range(num_decoding, len(self._running)):
            budget = self._add_chunk(chunks, row, budget)
        skipped: list[TokenSequence] = []
        prefilling = self._running[num_decoding:]
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            if self._running and (sequence.is_suspect or self._running[0].is_suspect):
                break
            length = max([sequence.length, *(other.length for other in self._running)])
            needed_length = min(length + _HEADROOM, self.limits.context_length)
            if not self._fits(len(self._running) + 1, needed_length if self._running else length):
                break
            self._waiting.pop(0)
            if self._batch.admit(sequence, prefilling):
                prefilling.append(sequence)
                budget = self._add_chunk(chunks, len(self._running) - 1, budget)
            else:
                skipped.append(sequence)
        self._waiting[:0] = skipped
        return chunks

    def _add_chunk(self, chunks: list[Chunk], row: int, budget: int) -> int:
        """Add the next part of a row's prompt, and return the budget that is left.

        The budget is 0 after an unfinished prompt, so that prompts are finished in order.
        """
        sequence = self._running[row]
        if budget <= 0:
            return 0
        end = sequence.beside_images(min(sequence.length, sequence.num_computed + budget))
        chunks.append(Chunk(row, sequence.num_computed, end))
        return budget - end + sequence.num_computed if end == sequence.length else 0

    def _make_room(self) -> None:
        """Make room in the cache for the tokens of this step; retract sequences if it is full."""
        while self._running:
            length = max(sequence.length for sequence in self._running)
            if self._fits(len(self._running), length):
                return
            self._retract_last()

    def _fits(self, num_rows: int, length: int) -> bool:
        """Make room in the cache for rows of this length, and return whether there is."""
        try:
            return self._kv.ensure(num_rows, length)
        except CacheMemoryError as error:
            logger.warning("%s; dropping the cached prefixes", error)
            self._prefixes.clear()
            if self._running:
                return False
        self._kv.release()
        return self._kv.ensure(num_rows, length)

    def _retract_last(self, *, keep: bool = True) -> TokenSequence:
        """Let the last running sequence wait again, before its equals."""
        sequence = self._running[-1]
        self._batch.leave(sequence, keep=keep)
        sequence.num_retractions += 1
        if not sequence.output_ids:
            sequence.prompt_logprobs.clear()  # its prompt is recomputed from the start
        bisect.insort_left(self._waiting, sequence, key=_turn)
        return sequence

    def _abort(self, sequence: TokenSequence) -> None:
        if sequence in self._running:
            self._batch.leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._held_back.remove(sequence)
        sequence.finish = _ABORTED
        self._end(sequence)

    def _end(self, sequence: TokenSequence) -> None:
        del self._in_flight[sequence.rid]
        self._finished.append(sequence)

    def _release_held_back(self) -> None:
        if self._paused is None and not self._is_draining:
            for sequence in self._held_back:
                bisect.insort_right(self._waiting, sequence, key=_turn)
            self._held_back.clear()


def _turn(sequence: TokenSequence) -> int:
    return -sequence.priority

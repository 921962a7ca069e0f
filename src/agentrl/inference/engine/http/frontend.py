"""`FrontEnd`: what the routes do, between the event loop of HTTP and the thread of the engine."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.inference.engine.engine_config import EngineConfig
from agentrl.inference.engine.generation.batch_scheduler import (
    PauseMode,
    Scheduler,
    SchedulerLimits,
    SchedulerLoad,
)
from agentrl.inference.engine.generation.engine_loop import EngineLoop
from agentrl.inference.engine.generation.grammars import Grammars, Held
from agentrl.inference.engine.generation.sequence import Sequence
from agentrl.inference.engine.http.request_log import RequestLog
from agentrl.inference.engine.http.request_parsing import (
    BadRequest,
    ModelLimits,
    ParsedRequest,
    parse_generate,
)
from agentrl.inference.engine.http.response_bodies import answer
from agentrl.inference.engine.http.text import Text, end_of_text_ids
from agentrl.inference.engine.weights.live_weights import read_weights
from agentrl.inference.engine.weights.lora_adapters import LoadedAdapters
from agentrl.inference.engine.weights.weight_receiver import (
    WeightManifest,
    WeightReceiver,
    awaited_tensors,
)
from agentrl.inference.wire import MIXED_LABEL
from agentrl.schema.grammar import Grammar

T = TypeVar("T")


class Refused(Exception):
    """A request that cannot be served, with the status to answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotFlushed(Exception):
    """The cache could not be flushed because sequences hold it."""


class FrontEnd:
    """The engine as the routes see it.

    Args:
        config: settings of the engine.
        model: the loaded model.
    """

    def __init__(self, config: EngineConfig, model: PreTrainedModel) -> None:
        self.config = config
        self.model_path = config.model_path
        self.served_model_name = config.model_path
        self.weight_version = config.weight_version
        """The version that `/model_info` shows; behind the engine's own after a failed flush."""
        self.model_type = str(model.config.model_type)
        self.architectures = list(model.config.architectures or [])
        self.text = Text(config.model_path)
        own_limit = int(model.config.max_position_embeddings)
        self.limits = ModelLimits(
            context_length=min(config.context_length or own_limit, own_limit),
            vocab_size=int(model.config.vocab_size),
            eos_ids=end_of_text_ids(config.model_path, model.config, self.text),
            has_experts=getattr(model.config, "num_experts_per_tok", None) is not None,
        )
        self._grammars: Grammars | None = None
        self._model = model
        self._seeds = random.Random(config.seed)
        self._scheduler = Scheduler(
            model,
            SchedulerLimits(
                max_running=config.max_running_requests,
                max_queued=config.max_queued_requests,
                context_length=self.limits.context_length,
                prefill_tokens_per_step=config.prefill_tokens_per_step,
                kv_cache_bytes=config.kv_cache_bytes,
                prefix_cache_bytes=config.prefix_cache_bytes,
            ),
            config.weight_version,
            self.text.find_stop,
        )
        self._endings: dict[Sequence, asyncio.Future[None]] = {}
        self._growth: dict[Sequence, asyncio.Event] = {}
        self.adapters = LoadedAdapters(model)
        self._updating = asyncio.Lock()
        self.broadcasts = WeightReceiver()
        """The groups over which new weights may come."""
        self._log = RequestLog(config.log_requests) if config.log_requests else None
        self.is_dead = False
        self.is_closing = False
        self.started_at = int(time.time())

    def start(self, on_death: Callable[[], None]) -> None:
        """Start the engine's thread; `on_death` is called in the event loop if it fails."""
        self._events = asyncio.get_running_loop()

        def died() -> None:
            self._events.call_soon_threadsafe(self._die, on_death)

        self._loop = EngineLoop(self._scheduler, self._on_events, died, self.config.num_threads)
        self._loop.start()

    def stop(self) -> None:
        """End the engine's thread."""
        self._loop.stop()
        if self._log is not None:
            self._log.close()

    # Generation.

    async def generate(self, request: ParsedRequest) -> list[dict[str, Any]]:
        """Serve a request to its end; sequences are aborted when the caller is cancelled.

        Raises:
            Refused: it cannot be served.
        """
        endings = self.submit(request)
        try:
            await asyncio.gather(*endings)
        except asyncio.CancelledError:
            self.drop(request)
            raise
        for sequence in request.sequences:
            if sequence.finish is not None and sequence.finish.status is not None:
                self.drop(request)
                raise Refused(sequence.finish.message, sequence.finish.status)
        return [self.answer(sequence, request) for sequence in request.sequences]

    async def stream(self, request: ParsedRequest) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield cumulative answers, each with the index of its sequence, as tokens come."""
        changed = asyncio.Event()
        for sequence in request.sequences:
            self._growth[sequence] = changed
        self.submit(request)
        # The first token at once, and then one frame an interval.
        due = dict.fromkeys(request.sequences, 1)
        open_sequences = list(request.sequences)
        try:
            while open_sequences:
                await changed.wait()
                changed.clear()
                if not self.is_serving:
                    raise self._gone()
                for index, sequence in enumerate(request.sequences):
                    if sequence not in open_sequences:
                        continue
                    ended = sequence.finish is not None
                    count = len(sequence.output_logprobs)
                    if ended and sequence.finish and sequence.finish.status is not None:
                        raise Refused(sequence.finish.message, sequence.finish.status)
                    if ended or count >= due[sequence]:
                        due[sequence] = count + request.stream_interval
                        if ended:
                            open_sequences.remove(sequence)
                        yield index, self.answer(sequence, request)
        finally:
            for sequence in request.sequences:
                self._growth.pop(sequence, None)
            self.drop(request)

    def parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        """Check a request.

        Raises:
            BadRequest: the request breaks a rule.
        """
        return parse_generate(
            body,
            self.limits,
            encode=self.text.encode,
            new_seed=lambda: self._seeds.getrandbits(63),
            adapters=self.adapters,
            hold=self._hold,
        )

    def _hold(self, grammar: Grammar) -> Held:
        if self._grammars is None:
            self._grammars = self.text.grammars(self.limits.vocab_size, self.limits.eos_ids)
        return self._grammars.hold(grammar)

    def submit(self, request: ParsedRequest) -> list[asyncio.Future[None]]:
        """Hand the sequences to the engine; the futures are done as they end."""
        if not self.is_serving:
            raise self._gone()
        endings: list[asyncio.Future[None]] = []
        for sequence in request.sequences:
            ending = self._events.create_future()
            self._endings[sequence] = ending
            endings.append(ending)
        self._loop.call(partial(self._scheduler.submit_all, request.sequences))
        return endings

    def drop(self, request: ParsedRequest) -> None:
        """End sequences that nobody waits for any more."""
        left = [sequence for sequence in request.sequences if sequence.finish is None]
        for sequence in request.sequences:
            self._endings.pop(sequence, None)
        self._let_go()
        if left:
            self._loop.call(partial(self._scheduler.abort_all_of, left))

    def answer(self, sequence: Sequence, request: ParsedRequest) -> dict[str, Any]:
        """Return the object that describes a sequence as far as it got."""
        return answer(sequence, request, self.text, self._scheduler.label)

    def _on_events(self, finished: list[Sequence], streamed: list[Sequence]) -> None:
        self._events.call_soon_threadsafe(self._deliver, finished, streamed)

    def _deliver(self, finished: list[Sequence], streamed: list[Sequence]) -> None:
        for sequence in finished:
            if self._log is not None:
                self._log.write(sequence)
            ending = self._endings.pop(sequence, None)
            if ending is not None and not ending.done():
                ending.set_result(None)
        self._let_go()
        for sequence in (*finished, *streamed):
            changed = self._growth.get(sequence)
            if changed is not None:
                changed.set()

    def close(self) -> None:
        """Refuse what is in flight and what still comes, so that clients go elsewhere at once."""
        self.is_closing = True
        self._refuse_all()

    def _die(self, on_death: Callable[[], None]) -> None:
        self.is_dead = True
        self._refuse_all()
        on_death()

    def _refuse_all(self) -> None:
        for ending in self._endings.values():
            if not ending.done():
                ending.set_exception(self._gone())
        self._endings.clear()
        self._let_go()
        for changed in self._growth.values():
            changed.set()

    def _gone(self) -> Refused:
        what = "the engine failed; see its log" if self.is_dead else "the server is shutting down"
        return Refused(what, 503)

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return not self.is_dead and not self.is_closing

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and return when those that use it have ended.

        Raises:
            InferenceError: there is none of this name.
        """
        retired = self.adapters.retire(name)
        self._let_go()
        await retired

    def _let_go(self) -> None:
        if self.adapters.has_retired:
            self.adapters.let_go({sequence.adapter for sequence in self._endings})

    # Control.

    def abort(self, rid: str | None) -> None:
        """End one request, or all of them; returns at once, as SGLang does."""
        if rid is None:
            self._loop.call(self._scheduler.abort_all)
        else:
            self._loop.call(partial(self._scheduler.abort, rid))

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`."""
        await self._call(partial(self._scheduler.pause, mode))

    async def resume(self) -> None:
        """Go on sampling."""
        await self._call(self._scheduler.resume)

    async def flush(self) -> bool:
        """Forget the prefix cache; False when sequences hold it."""
        return await self._call(self._scheduler.flush)

    async def release_memory(self, tags: Many[str]) -> None:
        """Give memory back; requests wait until it is there again.

        Raises:
            InferenceError: sequences are running; nothing has changed.
        """
        await self._call(partial(self._scheduler.release_memory, tags))

    async def resume_memory(self, tags: Many[str]) -> None:
        """Take memory again. Weights come without their values, which have to be loaded.

        Raises:
            InferenceError: some of it was not released; nothing has changed.
        """
        await self._call(partial(self._scheduler.resume_memory, tags))

    @property
    def is_paused(self) -> bool:
        """Whether sampling is paused."""
        return self._scheduler.is_paused

    def counters(self) -> dict[str, int]:
        """Return what was computed since the start."""
        scheduler = self._scheduler
        return {
            "num_sampled_tokens": scheduler.num_sampled,
            "num_prefilled_tokens": scheduler.num_prefilled,
            "num_cached_tokens": scheduler.num_cached,
        }

    @property
    def max_tokens(self) -> int:
        """Tokens of running sequences that there is room for."""
        return self._scheduler.max_tokens

    async def load(self) -> SchedulerLoad:
        """Return how busy the engine is."""
        return await self._call(self._scheduler.load)

    async def update_label(self, label: str, *, abort_all: bool) -> None:
        """Change the version without changing the weights."""

        def change() -> None:
            if abort_all:
                self._scheduler.abort_all()
            self._scheduler.label = label

        await self._call(change)
        self.weight_version = label

    async def update_weights(
        self, path: str, label: str | None, *, flush: bool, abort_all: bool
    ) -> int:
        """Load weights from a directory; unless paused, after all in flight have ended.

        Returns:
            The number of sequences in flight that go on under the new weights.

        Raises:
            InferenceError: they cannot be loaded; nothing has changed.
            NotFlushed: they are loaded, but sequences hold the cache.
        """
        async with self._updating:
            await self._call(self._scheduler.check_weights)
            tensors = await asyncio.to_thread(read_weights, path, self._model)
            if abort_all:
                await self._call(self._scheduler.abort_all)
            num_kept, is_flushed = await self._install(tensors, label, flush=flush)
            self.model_path = self.served_model_name = str(Path(path))
            self._note(label, is_flushed=is_flushed)
        return num_kept

    async def update_weights_from_group(
        self, manifest: WeightManifest, label: str | None, *, flush: bool, abort_all: bool
    ) -> None:
        """Take some weights from broadcasts; unless paused, after all in flight have ended.

        They come straight into the model's memory, and nothing is sampled meanwhile. Where they
        come in part only, what the model holds has the label of no policy.

        Raises:
            InferenceError: they do not fit, and nothing has changed; or they did not come, or are
                not finite.
            NotFlushed: they are loaded, but sequences hold the cache.
        """
        self.broadcasts.check(manifest.group)
        if abort_all:
            await self._call(self._scheduler.abort_all)
        async with self._updating:
            await self._call(self._scheduler.begin_weights, when_idle=True)
            left = self._scheduler.label
            loaded: list[torch.Tensor] = []
            try:
                awaited = awaited_tensors(manifest, self._model)
                left = MIXED_LABEL
                await self.broadcasts.receive(manifest.group, awaited)
                left = label or self._scheduler.label
                loaded = [tensor.place for tensor in awaited]
            finally:
                await self._call(partial(self._scheduler.weights_changed, left, loaded))
                if left == MIXED_LABEL:
                    self.weight_version = MIXED_LABEL
            self._note(label, is_flushed=not flush or await self.flush())

    async def _install(
        self, tensors: Mapping[str, torch.Tensor], label: str | None, *, flush: bool
    ) -> tuple[int, bool]:
        """Swap weights in; return the sequences in flight, and whether the cache is as asked for."""

        def install() -> tuple[int, bool]:
            num_kept = self._scheduler.num_in_flight
            self._scheduler.install(tensors, label)
            return num_kept, not flush or self._scheduler.flush()

        return await self._call(install, when_idle=True)

    def _note(self, label: str | None, *, is_flushed: bool) -> None:
        if not is_flushed:
            raise NotFlushed
        if label is not None:
            self.weight_version = label

    async def _call(self, run: Callable[[], T], *, when_idle: bool = False) -> T:
        if self.is_dead:
            raise self._gone()
        future: Future[T] = self._loop.call(run, when_idle=when_idle)
        return await asyncio.wrap_future(future)


__all__ = ["BadRequest", "FrontEnd", "NotFlushed", "Refused"]

"""`FrontEnd`: the engine's interface for the routes, on top of the engine's thread.

Sequences go to the scheduler; its events complete futures and wake streams here. Everything except
the engine's own calls runs in the event loop.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.inference.wire import MIXED_LABEL
from agentrl.models.attention.attention_registry import attention_of
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.generation.batch_scheduler import (
    BatchScheduler,
    SchedulerLimits,
)
from agentrl.plugins.engine.generation.cached_attention import ENGINE_ATTENTION
from agentrl.plugins.engine.generation.engine_loop import EngineLoop
from agentrl.plugins.engine.generation.grammars import GrammarCompiler, GrammarConstraint
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.http.engine_bodies import (
    GenerationBody,
    ModelLimits,
    ParsedRequest,
    parse_generate,
    read_body,
)
from agentrl.plugins.engine.http.http_errors import RequestRejected
from agentrl.plugins.engine.http.prompt_images import PromptImages
from agentrl.plugins.engine.http.response_bodies import answer
from agentrl.plugins.engine.http.text_codec import TextCodec
from agentrl.plugins.engine.weights.live_weights import read_weights
from agentrl.plugins.engine.weights.lora_adapters import LoadedAdapters
from agentrl.plugins.engine.weights.weight_receiver import (
    WeightManifest,
    WeightReceiver,
    awaited_tensors,
)
from agentrl.schema.grammar import Grammar

T = TypeVar("T")

_BODY_BYTES = 1 << 20
_BODY_BYTES_PER_TOKEN = 32
"""Ample, because an id takes up to 8 bytes of JSON, and a token of text about 4."""
_IMAGE_BODY_BYTES = 64 << 20
_MAX_SEQUENCES = 256
_COMPILER_STACK_BYTES = 64 << 20
"""The compiler of grammars is native code that recurses over them: the longest that is accepted
(`MAX_GRAMMAR_CHARS`) needs a part of this."""
_PREFILL_TOKENS, _MIN_PREFILL_TOKENS = 1024, 64
_PREFILL_FLOPS = 7e10
"""Of two CPU cores in a second. A server answers between two steps; a step that takes long looks like a
server that is down."""


def _parser_thread() -> ThreadPoolExecutor:
    """Return a thread with the stack size that compiling a grammar may need."""
    default_size = threading.stack_size(_COMPILER_STACK_BYTES)
    pool = ThreadPoolExecutor(1, "parser")
    pool.submit(int).result()
    threading.stack_size(default_size)
    return pool


class FrontEnd:
    """The engine's interface for the routes."""

    def __init__(self, config: EngineConfig, model: PreTrainedModel) -> None:
        self.config = config
        self.model_path = config.model_path
        self.served_model_name = config.model_path
        self.weight_version = config.weight_version
        """The version that `/model_info` reports; lags behind the engine's own after a failed
        flush.
        """
        self.model_type = str(model.config.model_type)
        self.architectures = list(model.config.architectures or [])
        self.text = TextCodec(config.model_path)
        text: Any = model.config.get_text_config()
        own_limit = int(text.max_position_embeddings)
        context_length = min(config.context_length or own_limit, own_limit)
        self.images = PromptImages(config.model_path, model.config, context_length)
        self.max_body_bytes = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * context_length
        """Largest body of a generation request."""
        if self.images.are_read:
            self.max_body_bytes += _IMAGE_BODY_BYTES
        self.limits = ModelLimits(
            context_length=context_length,
            vocab_size=int(text.vocab_size),
            eos_ids=self.text.end_ids(model.config),
            has_experts=attention_of(model) == ENGINE_ATTENTION
            and getattr(text, "num_experts_per_tok", None) is not None,
            max_sequences=_MAX_SEQUENCES,
            max_text_chars=context_length * self.text.longest_token,
        )
        self._parser = _parser_thread()
        self._grammars: GrammarCompiler | None = None
        self._model = model
        self._seeds = random.Random(config.seed)
        self.scheduler = BatchScheduler(
            model,
            SchedulerLimits(
                max_running=config.max_running_requests,
                max_queued=config.max_queued_requests,
                context_length=self.limits.context_length,
                prefill_tokens_per_step=config.prefill_tokens_per_step or _prefill_tokens(model),
                kv_cache_bytes=config.kv_cache_bytes,
                prefix_cache_bytes=config.prefix_cache_bytes,
            ),
            config.weight_version,
            self.text.find_stop,
        )
        self.adapters = LoadedAdapters(model)
        self._updating = asyncio.Lock()
        self.broadcasts = WeightReceiver()
        """The groups over which new weights may arrive."""
        self._loop = EngineLoop(self.scheduler, config.num_threads)
        self._log = RequestLog(config.log_requests) if config.log_requests else None
        self._endings: dict[TokenSequence, asyncio.Future[None]] = {}
        self._growth: dict[TokenSequence, asyncio.Event] = {}
        self.is_dead = False
        self._is_closing = False
        self.started_at = int(time.time())

    def start(self, on_death: Callable[[], None]) -> None:
        """Start the engine's thread; `on_death` is called in the event loop if it fails."""
        events = asyncio.get_running_loop()

        def die() -> None:
            self.is_dead = True
            self._refuse_all()
            on_death()

        def deliver(finished: list[TokenSequence], streamed: list[TokenSequence]) -> None:
            events.call_soon_threadsafe(self._deliver, finished, streamed)

        self._loop.start(on_events=deliver, on_death=lambda: events.call_soon_threadsafe(die))

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted, and some of them are computed."""
        return self.is_serving and not self._loop.is_failing

    def stop(self) -> None:
        """End the engine's thread."""
        self._loop.stop()
        self._parser.shutdown(cancel_futures=True)
        if self._log is not None:
            self._log.close()

    async def parse(self, raw: Mapping[str, Any]) -> ParsedRequest:
        """Check a request; raises `InvalidRequest`.

        Tokenizing and compiling may be slow, so they run in a thread, one request at a time.
        Requests with token ids bypass the thread.
        """
        body = read_body(GenerationBody, raw)
        if body.is_quick:
            return self._parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._parser, self._parse, body)

    def _parse(self, body: GenerationBody) -> ParsedRequest:
        return parse_generate(
            body,
            self.limits,
            encode=self.text.encode,
            show=self.images.show,
            new_seed=lambda: self._seeds.getrandbits(63),
            adapters=self.adapters,
            constrain=self._constrain,
        )

    def _constrain(self, grammar: Grammar) -> GrammarConstraint:
        if self._grammars is None:
            self._grammars = self.text.grammars(self.limits.vocab_size, self.limits.eos_ids)
        return self._grammars.start(grammar)

    # Generation.

    async def generate(self, request: ParsedRequest) -> list[dict[str, Any]]:
        """Serve a request to its end; sequences are aborted when the caller is cancelled."""
        endings = self._submit(request)
        try:
            await asyncio.gather(*endings)
        except asyncio.CancelledError:
            self._drop(request)
            raise
        for sequence in request.sequences:
            if sequence.finish is not None and sequence.finish.status is not None:
                self._drop(request)
                raise RequestRejected(sequence.finish.message, sequence.finish.status)
        return [
            answer(sequence, request, self.text, self.scheduler.label)
            for sequence in request.sequences
        ]

    async def stream(self, request: ParsedRequest) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield cumulative answers, each with the index of its sequence, as tokens arrive."""
        changed = asyncio.Event()
        for sequence in request.sequences:
            self._growth[sequence] = changed
        self._submit(request)
        # The first token is sent at once, then one frame per interval.
        next_frame_at = dict.fromkeys(request.sequences, 1)
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
                        raise RequestRejected(sequence.finish.message, sequence.finish.status)
                    if ended or count >= next_frame_at[sequence]:
                        next_frame_at[sequence] = count + (request.sampling.stream_interval or 1)
                        if ended:
                            open_sequences.remove(sequence)
                        yield index, answer(sequence, request, self.text, self.scheduler.label)
        finally:
            for sequence in request.sequences:
                self._growth.pop(sequence, None)
            self._drop(request)

    def _submit(self, request: ParsedRequest) -> list[asyncio.Future[None]]:
        """Submit the sequences to the engine; each future completes when its sequence ends."""
        if not self.is_serving:
            raise self._gone()
        events = asyncio.get_running_loop()
        endings: list[asyncio.Future[None]] = []
        for sequence in request.sequences:
            ending = events.create_future()
            self._endings[sequence] = ending
            endings.append(ending)
        self._loop.call(partial(self.scheduler.submit_all, request.sequences))
        return endings

    def _drop(self, request: ParsedRequest) -> None:
        """End sequences that no client waits for any more."""
        unfinished = [sequence for sequence in request.sequences if sequence.finish is None]
        for sequence in request.sequences:
            self._endings.pop(sequence, None)
        self._release_adapters()
        if unfinished:
            self._loop.call(partial(self.scheduler.abort_all_of, unfinished))

    def _deliver(self, finished: list[TokenSequence], streamed: list[TokenSequence]) -> None:
        """Notify waiters of sequences that ended and streams that grew."""
        for sequence in finished:
            if self._log is not None:
                self._log.write(sequence)
            ending = self._endings.pop(sequence, None)
            if ending is not None and not ending.done():
                ending.set_result(None)
        self._release_adapters()
        for sequence in (*finished, *streamed):
            changed = self._growth.get(sequence)
            if changed is not None:
                changed.set()

    def close(self) -> None:
        """Refuse current and further requests, so that clients turn to other servers at once."""
        self._is_closing = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for ending in self._endings.values():
            if not ending.done():
                ending.set_exception(self._gone())
        self._endings.clear()
        self._release_adapters()
        for changed in self._growth.values():
            changed.set()

    def _gone(self) -> RequestRejected:
        """Return the error to answer once the engine has stopped serving."""
        message = (
            "the engine failed; see its log" if self.is_dead else "the server is shutting down"
        )
        return RequestRejected(message, 503)

    @property
    def is_serving(self) -> bool:
        """Whether requests are accepted."""
        return not self.is_dead and not self._is_closing

    def _release_adapters(self) -> None:
        """Release retired adapters that no request uses any more."""
        if self.adapters.has_retired:
            self.adapters.release_unused({sequence.adapter for sequence in self._endings})

    # Control.

    def check_place(self, path: str) -> None:
        """Refuse weights outside the allowed directories, also behind a link."""
        roots = self.config.weight_roots
        try:
            resolved = Path(path).resolve()
            resolved.exists()  # raises for a name that is too long
        except (OSError, ValueError) as error:
            raise InferenceError(f"{path!r} is no path: {error}") from error
        if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
            raise InferenceError(
                f"{path} is outside the directories that this server loads weights from "
                "(--weight-root; in a run, its output directory and weight_roots)"
            )

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter while generations continue."""
        self.check_place(path)
        await self.adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; return when those that use it have ended."""
        retired = self.adapters.retire(name)
        self._release_adapters()
        await retired

    def abort(self, rid: str | None) -> None:
        """End one request, or all of them; returns at once, as SGLang does."""
        if rid is None:
            self._loop.call(self.scheduler.abort_all)
        else:
            self._loop.call(partial(self.scheduler.abort, rid))

    async def update_label(self, label: str, *, abort_all: bool) -> None:
        """Change the version label without changing the weights."""

        def change() -> None:
            if abort_all:
                self.scheduler.abort_all()
            self.scheduler.label = label

        await self.call(change)
        self.weight_version = label

    async def update_weights(
        self, path: str, label: str | None, *, flush: bool, abort_all: bool
    ) -> tuple[int, bool]:
        """Load weights from a directory; unless paused, after all in flight have ended.

        Returns the number of sequences in flight that continue under the new weights, and whether
        the cache was flushed if requested: it is not while sequences hold it. Raises
        `InferenceError` if they cannot be loaded; nothing has changed then.
        """

        def install() -> tuple[int, bool]:
            num_kept = self.scheduler.num_in_flight
            self.scheduler.install(tensors, label)
            return num_kept, not flush or self.scheduler.flush()

        async with self._updating:
            await self.call(self.scheduler.memory.check_weights)
            tensors = await asyncio.to_thread(read_weights, path, self._model)
            if abort_all:
                await self.call(self.scheduler.abort_all)
            num_kept, is_flushed = await self.call(install, when_idle=True)
            self.model_path = self.served_model_name = str(Path(path))
            self._record_label(label, is_flushed=is_flushed)
        return num_kept, is_flushed

    async def update_weights_from_group(
        self, manifest: WeightManifest, label: str | None, *, flush: bool, abort_all: bool
    ) -> bool:
        """Receive some weights from broadcasts; unless paused, after all in flight have ended.

        They are received directly into the model's memory, and sampling pauses during the call. If
        only a part arrives, the model's weights carry the label of no policy.

        Returns whether the cache was flushed if requested. Raises `InferenceError` if they do not
        fit, and nothing has changed; or if they did not arrive, or are not finite.
        """
        self.broadcasts.check(manifest.group)
        if abort_all:
            await self.call(self.scheduler.abort_all)
        async with self._updating:
            await self.call(self.scheduler.begin_weights, when_idle=True)
            final_label = self.scheduler.label
            loaded: list[torch.Tensor] = []
            try:
                awaited = awaited_tensors(manifest, self._model)
                final_label = MIXED_LABEL
                await self.broadcasts.receive(manifest.group, awaited)
                final_label = label or self.scheduler.label
                loaded = [tensor.place for tensor in awaited]
            finally:
                await self.call(partial(self.scheduler.weights_changed, final_label, loaded))
                if final_label == MIXED_LABEL:
                    self.weight_version = MIXED_LABEL
            is_flushed = not flush or await self.call(self.scheduler.flush)
            self._record_label(label, is_flushed=is_flushed)
        return is_flushed

    def _record_label(self, label: str | None, *, is_flushed: bool) -> None:
        if is_flushed and label is not None:
            self.weight_version = label

    async def call(self, run: Callable[[], T], *, when_idle: bool = False) -> T:
        """Run something in the engine's thread, and return its result."""
        if self.is_dead:
            raise self._gone()
        future: Future[T] = self._loop.call(run, when_idle=when_idle)
        return await asyncio.wrap_future(future)


class RequestLog:
    """Appends a JSON line for every sequence that ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered, so that a line is complete or absent if the engine is killed.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, sequence: TokenSequence) -> None:
        """Log the prompt as received and the sampled ids."""
        line = {
            "rid": sequence.rid,
            "input_ids": sequence.tokens[: sequence.num_prompt].tolist(),
            "output_ids": list(sequence.output_ids),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _prefill_tokens(model: PreTrainedModel) -> int:
    """Return the prompt tokens of a step, at about 2 FLOP for each parameter and token."""
    if model.device.type != "cpu":
        return _PREFILL_TOKENS
    in_time = int(_PREFILL_FLOPS / (2 * model.num_parameters()))
    return max(_MIN_PREFILL_TOKENS, min(in_time, _PREFILL_TOKENS))

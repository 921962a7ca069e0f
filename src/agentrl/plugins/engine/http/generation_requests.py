"""`GenerationRequests`: requests of `/generate`, between the event loop and the engine's thread.

Sequences go to the scheduler; its events complete futures and wake streams here. Everything except
the engine's own calls runs in the event loop.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler
from agentrl.plugins.engine.generation.engine_loop import EngineLoop
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.http.engine_bodies import ParsedRequest
from agentrl.plugins.engine.http.http_errors import RequestRejected
from agentrl.plugins.engine.http.response_bodies import answer
from agentrl.plugins.engine.http.text_codec import TextCodec
from agentrl.plugins.engine.weights.lora_adapters import LoadedAdapters


class GenerationRequests:
    """Requests in flight.

    The log gets a line with the token ids of every request.
    """

    def __init__(
        self,
        scheduler: BatchScheduler,
        loop: EngineLoop,
        text: TextCodec,
        adapters: LoadedAdapters,
        log_path: Path | None,
    ) -> None:
        self._scheduler = scheduler
        self._loop = loop
        self._text = text
        self._adapters = adapters
        self._log = RequestLog(log_path) if log_path else None
        self._endings: dict[TokenSequence, asyncio.Future[None]] = {}
        self._growth: dict[TokenSequence, asyncio.Event] = {}
        self.is_dead = False
        self.is_closing = False

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
        return [self._answer(sequence, request) for sequence in request.sequences]

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
                    raise self.gone()
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
                        yield index, self._answer(sequence, request)
        finally:
            for sequence in request.sequences:
                self._growth.pop(sequence, None)
            self._drop(request)

    def _submit(self, request: ParsedRequest) -> list[asyncio.Future[None]]:
        """Submit the sequences to the engine; each future completes when its sequence ends."""
        if not self.is_serving:
            raise self.gone()
        events = asyncio.get_running_loop()
        endings: list[asyncio.Future[None]] = []
        for sequence in request.sequences:
            ending = events.create_future()
            self._endings[sequence] = ending
            endings.append(ending)
        self._loop.call(partial(self._scheduler.submit_all, request.sequences))
        return endings

    def _drop(self, request: ParsedRequest) -> None:
        """End sequences that no client waits for any more."""
        unfinished = [sequence for sequence in request.sequences if sequence.finish is None]
        for sequence in request.sequences:
            self._endings.pop(sequence, None)
        self.release_adapters()
        if unfinished:
            self._loop.call(partial(self._scheduler.abort_all_of, unfinished))

    def _answer(self, sequence: TokenSequence, request: ParsedRequest) -> dict[str, Any]:
        return answer(sequence, request, self._text, self._scheduler.label)

    def deliver(self, finished: list[TokenSequence], streamed: list[TokenSequence]) -> None:
        """Notify waiters of sequences that ended and streams that grew."""
        for sequence in finished:
            if self._log is not None:
                self._log.write(sequence)
            ending = self._endings.pop(sequence, None)
            if ending is not None and not ending.done():
                ending.set_result(None)
        self.release_adapters()
        for sequence in (*finished, *streamed):
            changed = self._growth.get(sequence)
            if changed is not None:
                changed.set()

    def close(self) -> None:
        """Refuse current and further requests, so that clients turn to other servers at once."""
        self.is_closing = True
        self._refuse_all()

    def die(self) -> None:
        """Refuse everything because the engine's thread has failed."""
        self.is_dead = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for ending in self._endings.values():
            if not ending.done():
                ending.set_exception(self.gone())
        self._endings.clear()
        self.release_adapters()
        for changed in self._growth.values():
            changed.set()

    def gone(self) -> RequestRejected:
        """Return the error to answer once the engine has stopped serving."""
        message = (
            "the engine failed; see its log" if self.is_dead else "the server is shutting down"
        )
        return RequestRejected(message, 503)

    @property
    def is_serving(self) -> bool:
        """Whether requests are accepted."""
        return not self.is_dead and not self.is_closing

    def release_adapters(self) -> None:
        """Release retired adapters that no request uses any more."""
        if self._adapters.has_retired:
            self._adapters.release_unused({sequence.adapter for sequence in self._endings})

    def stop(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


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

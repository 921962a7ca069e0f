"""Defines dialects, and carries out their calls for clients that may disconnect.

A dialect is one protocol that clients speak: a module that reads its requests and writes its
answers, whole or as server-sent events, and an entry in `api_server.DIALECTS`. The session answers
the calls.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agentrl.errors import APIError
from agentrl.inference.dialects.session import (
    DELTA_KINDS,
    Completion,
    Delta,
    ModelSession,
    OnDelta,
    session_over,
)
from agentrl.inference.openapi import Schema
from agentrl.inference.request_bodies import while_connected
from agentrl.schema import Message


class DialectCall(Protocol):
    """One request, parsed and checked, and the form of its answer."""

    @property
    def stream(self) -> bool:
        """Whether the client wants server-sent events instead of one body."""

    async def run(self, on_delta: OnDelta | None) -> Completion:
        """Answer through the session."""

    def body(self, completion: Completion) -> dict[str, Any]:
        """Return the whole answer."""

    def delta_events(self, delta: Delta) -> Iterator[str]:
        """Yield the events that carry further text."""

    def final_events(self, completion: Completion) -> Iterator[str]:
        """Yield the events that end a stream, after all of its text was sent."""

    def error_events(self, error: APIError) -> Iterator[str]:
        """Yield the events that end a stream with an error."""


def bearer_key(headers: Mapping[str, str]) -> str:
    """Return the API key of `Authorization: Bearer KEY`; empty if there is none."""
    return headers.get("authorization", "").partition(" ")[2]


@dataclass(frozen=True)
class Dialect:
    """One protocol."""

    path: str
    """Path below the address of a rollout, such as `/v1/chat/completions`."""
    read: Callable[[Mapping[str, Any], ModelSession], DialectCall]
    """Reads a request's body; raises `APIError` if it is malformed or exceeds a limit."""
    error_body: Callable[[APIError], dict[str, Any]]
    """Writes an error that is returned instead of a stream."""
    schema: Schema
    """The JSON schema of a request's body."""
    api_key: Callable[[Mapping[str, str]], str] = bearer_key
    """Finds the API key among a request's headers."""


async def answer(http: Request, session: ModelSession, call: DialectCall) -> Response:
    """Carry out a call; it is cancelled when the client disconnects or the rollout ends.

    Raises:
        APIError: the request cannot be answered, and nothing was sent yet.
    """
    if call.stream:
        return await _stream_response(http, session, call)
    task = session.start(call.run(None))
    try:
        await while_connected(http, asyncio.wait({task}))
        return JSONResponse(call.body(_result(task)))
    finally:
        task.cancel()


async def _stream_response(http: Request, session: ModelSession, call: DialectCall) -> Response:
    """Return a stream once the first text exists, so that earlier errors have an HTTP status."""
    # None marks the end of the call.
    deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
    task = session.start(call.run(deltas.put_nowait))
    task.add_done_callback(lambda _: deltas.put_nowait(None))
    try:
        first = await while_connected(http, deltas.get())
        if first is None:
            _result(task)
    except BaseException:
        task.cancel()
        raise
    events = _events(task, first, deltas, call)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    task: asyncio.Task[Completion],
    delta: Delta | None,
    deltas: asyncio.Queue[Delta | None],
    call: DialectCall,
) -> AsyncIterator[str]:
    remainder = Remainder()
    try:
        while delta is not None:
            remainder.count(delta)
            for event in call.delta_events(delta):
                yield event
            delta = await deltas.get()
        try:
            completion = _result(task)
        except APIError as error:
            for event in call.error_events(error):
                yield event
            return
        for unsent in remainder.of(completion.message):
            for event in call.delta_events(unsent):
                yield event
        for event in call.final_events(completion):
            yield event
    finally:
        task.cancel()


class Remainder:
    """Counts the text of a reply that was sent, and finds the rest at the end."""

    def __init__(self) -> None:
        self._lengths = dict.fromkeys(DELTA_KINDS, 0)

    def count(self, delta: Delta) -> None:
        """Count a delta that was sent."""
        self._lengths[delta.kind] += len(delta.text)

    def of(self, message: Message) -> list[Delta]:
        """Return the unsent rest of a whole reply, which starts with the sent text."""
        remainders = (
            (kind, message.get(kind, "")[length:]) for kind, length in self._lengths.items()
        )
        return [Delta(kind, text) for kind, text in remainders if text]


def _result(task: asyncio.Task[Completion]) -> Completion:
    if task.cancelled():
        raise session_over()
    return task.result()

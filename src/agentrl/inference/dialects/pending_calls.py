"""Calls carried out for clients that may go away, answered whole or as a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.deltas import Delta, Listen, Remainder
from agentrl.inference.dialects.session import Session, session_over

Call = Callable[[Listen | None], Coroutine[Any, Any, Completion]]
"""Is told a listener of its words, if there is one, and returns the whole."""
_T = TypeVar("_T")


class Frames(Protocol):
    """Server-sent events in one of OpenAI's forms."""

    def words(self, delta: Delta) -> Iterator[str]:
        """Yield what shows further words."""

    def end(self, completion: Completion) -> Iterator[str]:
        """Yield what shows the rest of a completion whose words were all shown."""

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield what ends the stream with an error."""


async def whole(http: Request, session: Session, call: Call) -> Completion:
    """Run a call; it is cancelled when the client goes away or the rollout ends."""
    working = session.start(call(None))
    try:
        await _while_connected(http, asyncio.wait({working}))
        return _result(working)
    finally:
        working.cancel()


async def streamed(http: Request, session: Session, call: Call, frames: Frames) -> Response:
    """Answer with a stream. It begins with the first words, so that refusals have a status."""
    said: asyncio.Queue[Delta | None] = asyncio.Queue()
    working = session.start(call(said.put_nowait))
    working.add_done_callback(lambda _: said.put_nowait(None))
    try:
        first = await _while_connected(http, said.get())
        if first is None:
            _result(working)
    except BaseException:
        working.cancel()
        raise
    sending = _frames_of(working, first, said, frames)
    return StreamingResponse(sending, media_type="text/event-stream")


async def _frames_of(
    working: asyncio.Task[Completion],
    delta: Delta | None,
    said: asyncio.Queue[Delta | None],
    frames: Frames,
) -> AsyncIterator[str]:
    remainder = Remainder()
    try:
        while delta is not None:
            remainder.count(delta)
            for frame in frames.words(delta):
                yield frame
            delta = await said.get()
        try:
            completion = _result(working)
        except Refusal as refusal:
            for frame in frames.failed(refusal):
                yield frame
            return
        for rest in remainder.of(completion.message):
            for frame in frames.words(rest):
                yield frame
        for frame in frames.end(completion):
            yield frame
    finally:
        working.cancel()


async def _while_connected(http: Request, awaited: Coroutine[Any, Any, _T]) -> _T:
    """Wait for something unless the client goes away."""
    waiting = asyncio.create_task(awaited)
    leaving = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise HTTPException(499, "the client is gone")
        return waiting.result()
    finally:
        leaving.cancel()
        waiting.cancel()


def _result(working: asyncio.Task[Completion]) -> Completion:
    if working.cancelled():
        raise session_over()
    return working.result()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass

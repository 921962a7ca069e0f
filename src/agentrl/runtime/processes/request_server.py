"""`RequestServer`: a child process that answers the requests of a `RequestProcess`.

Input: one JSON request per line on stdin. Output: one JSON reply per line on stdout, in any order.
The handlers are the user's code: their output goes to stderr, and they cannot read from stdin. The
process exits when stdin closes.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

from agentrl.errors import AgentRLError
from agentrl.runtime.telemetry.loop_watch import LoopWatch

Answer = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""A request without its id, to the fields of its reply. It raises only `CancelledError`."""

_NUM_THREADS = 256
"""Maximum number of concurrent plain functions; they mostly wait."""


class RequestServer:
    """Takes over stdin and stdout, and answers each request in a separate task."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self._request_stream = os.fdopen(os.dup(0), encoding="utf-8")
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        with open(os.devnull) as devnull:
            os.dup2(devnull.fileno(), 0)
        os.dup2(2, 1)
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._accepts_requests = True

    def run(self, load: Callable[[], Answer]) -> NoReturn:
        """Answer until stdin closes, then exit the process, including running threads."""
        try:
            answer = load()
        except AgentRLError as error:
            self._reply({"id": 0, "error": str(error)})
            sys.exit(2)
        asyncio.run(self._serve(answer))
        sys.stderr.flush()
        os._exit(0)

    def exit_when_idle(self) -> None:
        """Exit the process once all running requests are answered."""
        self._accepts_requests = False

    async def _serve(self, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="request"))
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        with self._watch.watching(loop):
            while (request := await self._requests.get()) is not None:
                self._take(request, answer)

    def _take(self, request: dict[str, Any], answer: Answer) -> None:
        request_id = request.pop("id")
        if "cancel" not in request:
            task = asyncio.create_task(self._answer(request_id, request, answer))
            self._running[request_id] = task
            # A callback, because the task may be cancelled before its first line runs.
            task.add_done_callback(partial(self._forget, request_id))
        elif request_id in self._running:
            self._running[request_id].cancel()

    async def _answer(self, request_id: int, request: dict[str, Any], answer: Answer) -> None:
        self._reply({"id": request_id, **await answer(request)})

    def _forget(self, request_id: int, _task: "asyncio.Task[None]") -> None:
        del self._running[request_id]
        if not self._accepts_requests and not self._running:
            self._requests.put_nowait(None)

    def _reply(self, reply: Mapping[str, Any]) -> None:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            for line in self._request_stream:
                loop.call_soon_threadsafe(self._requests.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(self._requests.put_nowait, None)

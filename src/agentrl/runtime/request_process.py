"""`RequestProcess`: a child process that answers JSON requests, one a line, in any order.

    {"id": 1, ...}   ->   {"id": 1, ...}        {"id": 1, "cancel": true} when the asker gave up

A reply of id 0 has an `error`, the reason why the child is about to end. It ends when its stdin does.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from agentrl.errors import AgentWorkerError

_END_SECONDS = 5.0


class RequestProcess:
    """One child process; requests may come from any thread and any event loop.

    Args:
        name: what it is, for messages.
        argv: its command.
        environment: all of its environment variables.
        quiet: what it writes to stderr is dropped; otherwise it goes where ours goes.
        encode: turns a request into JSON.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        quiet: bool = False,
        encode: Callable[[object], str] = json.dumps,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self._encode = encode
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._end = ""
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still takes requests."""
        return not self._end and self._process.poll() is None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a reply."""
        return len(self._waiting)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; a caller that is cancelled has the request cancelled.

        Raises:
            AgentWorkerError: the process ended.
        """
        number, reply = self._sent(request)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            with contextlib.suppress(AgentWorkerError):
                self._write({"id": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)

    def ask_and_wait(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply to a request, from code that is not asynchronous.

        Raises:
            AgentWorkerError: the process ended.
            TimeoutError: it takes longer.
        """
        number, reply = self._sent(request)
        try:
            return reply.result(seconds)
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the process; requests that wait are lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listening.join()

    def _sent(self, request: Mapping[str, Any]) -> tuple[int, Future[dict[str, Any]]]:
        number = next(self._numbers)
        reply: Future[dict[str, Any]] = Future()
        self._waiting[number] = reply
        try:
            self._write({"id": number, **request})
        except AgentWorkerError:
            del self._waiting[number]
            raise
        return number, reply

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        line = self._encode(request) + "\n"
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: the pipe is closed
            self._listening.join(_END_SECONDS)
            raise AgentWorkerError(self._end or f"{self._name} ended") from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                self._answered(json.loads(line))
        status = self._process.wait()
        self._end = self._end or f"{self._name} ended with status {status}"
        for reply in list(self._waiting.values()):
            with contextlib.suppress(InvalidStateError):  # it was cancelled in this moment
                reply.set_exception(AgentWorkerError(self._end))

    def _answered(self, answer: dict[str, Any]) -> None:
        if answer["id"] == 0:
            self._end = answer["error"]
            return
        reply = self._waiting.get(answer["id"])
        if reply is not None:
            with contextlib.suppress(InvalidStateError):
                reply.set_result(answer)

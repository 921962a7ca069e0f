"""`RequestProcess`: a child process that answers JSON requests, one per line, in any order.

    {"id": 1, ...}   ->   {"id": 1, ...}        {"id": 1, "cancel": true} if the caller gave up

A reply with id 0 has an `error`, the reason why the child is about to exit. The child exits when
its stdin closes. `RequestServer` is the other end where the child's interpreter has this package.

The child runs third-party code. Its replies are checked against limits before parsing, its output is
truncated at a limit, and its descendants are killed with it. Threads communicate with it, so no
event loop waits for its pipes.
"""

import asyncio
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from agentrl.config.secrets import redact
from agentrl.errors import AgentWorkerError, UnreadableReply
from agentrl.runtime.http.bounded_replies import density, num_marks
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.child_processes import keeper_command, signal_group
from agentrl.runtime.processes.restarts import ending

MAX_REPLY_BYTES = 1 << 24
MAX_OUTPUT_CHARS = 1 << 23
"""Limit on the forwarded standard error of a child; its start is the most informative part."""
_MAX_REASON_CHARS = 500
_LINE_BYTES = 1 << 16
_END_SECONDS = 5.0
_LAST_REPLY_SECONDS = 1.0
"""How long remaining replies of an exited process are read."""


class RequestProcess:
    """One child process; requests may come from any thread and any event loop."""

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
            keeper_command(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._encode = encode
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._request_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._reason = ""
        self._exit_message = ""
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        targets = [self._send, self._receive, *([] if quiet else [self._forward_output])]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()

    @property
    def process_id(self) -> int:
        """Id of the child's keeper; the two exit together."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still accepts requests."""
        return not self._exit_message and not self._reason and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Its exit status as `subprocess` represents it; None while it runs."""
        return self._process.returncode

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a reply."""
        return len(self._pending)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; cancelling the caller cancels the request."""
        request_id, reply = self._submit(request)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            self._write({"id": request_id, "cancel": True})
            raise
        finally:
            self._pending.pop(request_id, None)

    def ask_and_wait(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply to a request, from code that is not asynchronous."""
        request_id, reply = self._submit(request)
        try:
            return reply.result(seconds)
        finally:
            self._pending.pop(request_id, None)

    def close(self, grace_seconds: float = _END_SECONDS) -> None:
        """Stop the process and its descendants; pending requests are lost.

        Args:
            grace_seconds: time to exit by itself once its stdin is closed.
        """
        self._to_send.put(None)
        self._watcher.join(grace_seconds)
        for kill in (self._kill, partial(signal_group, self._process.pid)):
            if self._watcher.is_alive():
                kill()
                self._watcher.join(_END_SECONDS)

    def _submit(self, request: Mapping[str, Any]) -> tuple[int, Future[dict[str, Any]]]:
        request_id = next(self._request_ids)
        reply: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._exit_message:
                raise AgentWorkerError(self._exit_message)
            self._pending[request_id] = reply
        try:
            self._write({"id": request_id, **request})
        except BaseException:
            del self._pending[request_id]
            raise
        return request_id, reply

    def _write(self, request: Mapping[str, Any]) -> None:
        self._to_send.put(self._encode(request).encode() + b"\n")

    def _kill(self) -> None:
        """Kill the process and all its descendants."""
        self._process.send_signal(signal.SIGHUP)

    # --- the threads ----------------------------------------------------------------------------

    def _send(self) -> None:
        """Write requests; a child may be slow to read them."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as requests:
                while (line := self._to_send.get()) is not None:
                    requests.write(line)
                    requests.flush()
        except OSError:  # the reader is gone
            try:  # if it is about to exit, its own status is more informative
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            while line := replies.readline(MAX_REPLY_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_REPLY_BYTES:
                    return  # it died while writing; its exit status is more informative
                try:
                    self._resolve(line)
                except UnreadableReply as error:
                    self._reason = f"{self._name} was stopped: {one_line(str(error))}"
                    self._kill()
                    return

    def _resolve(self, line: bytes) -> None:
        if len(line) == MAX_REPLY_BYTES:
            raise UnreadableReply(f"its response is longer than {MAX_REPLY_BYTES >> 20} MiB")
        if (reason := density(num_marks(line))) is not None:
            raise UnreadableReply(reason)
        try:
            # The standard library's parser accepts NaN, which children in Python may write.
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableReply(f"the response is not JSON: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("id"), int):
            raise UnreadableReply("the response is not a JSON object with the id of a request")
        if message["id"] == 0:
            self._reason = one_line(str(message.get("error")), _MAX_REASON_CHARS)
            return
        reply = self._pending.get(message["id"])
        if reply is not None:
            with contextlib.suppress(InvalidStateError):
                reply.set_result(message)

    def _forward_output(self) -> None:
        """Forward its output as printable lines, up to a limit."""
        assert self._process.stderr is not None
        num_remaining = MAX_OUTPUT_CHARS
        with self._process.stderr as output:
            while line := output.readline(_LINE_BYTES):
                if num_remaining <= 0:
                    continue  # keep reading, so that the child never blocks on the pipe
                text = one_line(redact(line.decode(errors="replace").rstrip("\n"))) + "\n"
                num_remaining -= len(text)
                if num_remaining <= 0:
                    text += f"--- {self._name} printed too much; further output is discarded\n"
                os.write(2, text.encode())

    def _watch(self) -> None:
        """Fail pending requests once the process has exited."""
        status = self._process.wait()
        signal_group(self._process.pid)  # the group outlives a keeper that was killed itself
        for thread in self._threads[1:]:  # the sending thread ends at the None below
            thread.join(_LAST_REPLY_SECONDS)
        self._to_send.put(None)
        with self._lock:
            self._exit_message = self._reason or f"{self._name} {ending(status)}"
        for reply in list(self._pending.values()):
            with contextlib.suppress(InvalidStateError):  # it was cancelled concurrently
                reply.set_exception(AgentWorkerError(self._exit_message))

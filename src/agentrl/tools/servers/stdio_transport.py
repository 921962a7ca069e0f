"""MCP over the pipes of a command, with confinement, size limits and a log of its standard error.

The SDK's own transport buffers lines of any length, lets a call whose response it cannot parse wait
forever, and leaves what a server started running when the server itself exits. Input: a server's
description. Output: the streams that the SDK's client reads and writes. The server's standard error
is kept in a size-limited log, whose end is quoted in the error if the server dies.
"""

import asyncio
import contextlib
import json
import logging
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import INTERNAL_ERROR, PARSE_ERROR, ErrorData, JSONRPCError
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from agentrl.config.private_files import make_private
from agentrl.config.secrets import redact
from agentrl.errors import ToolError
from agentrl.runtime.http.bounded_replies import density, num_marks
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.child_processes import end_group
from agentrl.runtime.processes.wall import wall_hint
from agentrl.tools.servers.admission import FAILURE_KEY, MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 8 * 2**20
"""Limit on the stored standard error of a server; its start is the most informative part."""
_MAX_LINE_CHARS = 500
_LOG_CHUNK_BYTES = 2**16
_END_SECONDS = 2.0
"""Grace period of a server after its standard input is closed, and again after SIGTERM."""
_ID_BYTES = 1_000
"""Servers write a message's id before the result or after it."""
_ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"\\]{1,64}")')

_Streams = tuple[Any, Any]


class StdioServer:
    """A command that is or was running: its process and standard error."""

    def __init__(self, address: str, log_path: Path | None) -> None:
        """Prepare; standard error is appended to a log of bounded size, if one is named."""
        self.address = address
        self.pid: int | None = None
        self.exit_status: int | None = None
        """Of a command that has exited; negative if it was killed."""
        self._log_path = log_path
        self._num_logged = 0
        self._last: deque[str] = deque(maxlen=1)
        self.hint = ""
        """Which flag opens what it was refused, if its output says so."""

    @property
    def last_line(self) -> str:
        """The last non-empty line, made printable."""
        return self._last[0] if self._last else ""

    async def read_stderr(self, stream: asyncio.StreamReader) -> None:
        """Read all of standard error, so that the server never blocks on writing it."""
        rest = ""
        while chunk := await stream.read(_LOG_CHUNK_BYTES):
            *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
            rest = rest[-_LOG_CHUNK_BYTES:]
            self._log(lines)
        self._log([rest])

    def _log(self, lines: Sequence[str]) -> None:
        texts = [one_line(redact(line[:_LOG_CHUNK_BYTES])) for line in lines if line.strip()]
        if texts:
            self._note_hint("\n".join(texts))
            self._last.append(texts[-1][:_MAX_LINE_CHARS])
        if self._log_path is None or not texts or self._num_logged >= MAX_LOG_BYTES:
            return
        text = "".join(f"{line}\n" for line in texts)
        self._num_logged += len(text)
        if self._num_logged >= MAX_LOG_BYTES:
            text += f"--- more than {MAX_LOG_BYTES >> 20} MiB: the rest is discarded\n"
        make_private(self._log_path.parent)
        self._log_path.touch(0o600)
        with self._log_path.open("a", encoding="utf-8") as log:
            log.write(text)

    def _note_hint(self, output: str) -> None:
        """Keep how to open what is refused, and log it: servers tell clients no reason."""
        hint = wall_hint(output)
        if hint and not self.hint:
            self.hint = hint
            _warn_of_closed_path(hint, self._log_path)


@cache
def _warn_of_closed_path(hint: str, log_path: Path | None) -> None:
    """Warn once for each server, which may be started for every rollout."""
    log = "" if log_path is None else f" (see {log_path})"
    logger.warning("a tool server was refused a path%s%s", log, hint)


@asynccontextmanager
async def stdio_transport(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    child: StdioServer,
) -> AsyncIterator[_Streams]:
    """Start a command and yield the streams of its connection; it is stopped with the context."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            limit=MAX_MESSAGE_BYTES,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise ToolError(f"it failed to start: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    child.pid = process.pid
    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_send, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    async with asyncio.TaskGroup() as tasks:
        reading_stderr = tasks.create_task(child.read_stderr(process.stderr))
        reading = tasks.create_task(_read(process.stdout, incoming, child.address))
        writing = tasks.create_task(_write(process.stdin, outgoing))
        try:
            yield received, to_send
        finally:
            writing.cancel()
            reading.cancel()
            await asyncio.shield(_end(process))
            child.pid, child.exit_status = None, process.returncode
            # A process that left the group may keep standard error open.
            await asyncio.wait({reading_stderr}, timeout=_END_SECONDS)
            reading_stderr.cancel()
            for stream in (incoming, received, to_send, outgoing):
                await stream.aclose()


async def _read(stream: asyncio.StreamReader, incoming: Any, address: str) -> None:
    has_skipped = False
    async with incoming:
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                size = f"{MAX_MESSAGE_BYTES >> 20} MiB"
                logger.warning("%s: stopped, it sent a line of more than %s", address, size)
                return
            message = _parsed(line)
            if message is None:
                if not has_skipped:
                    text = "%s: ignoring output that is not an MCP message: %.80r"
                    logger.warning(text, address, line.decode(errors="replace").rstrip())
                has_skipped = True
                continue
            try:
                await incoming.send(message)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                return


def _parsed(line: bytes) -> SessionMessage | None:
    """Return a line's message; for an unreadable response, an error; None if it is neither."""
    if (reason := density(num_marks(line))) is not None:
        data = {FAILURE_KEY: "too_large"}
        failure = ErrorData(code=INTERNAL_ERROR, message=reason, data=data)
    else:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            is_json = first["type"] != "json_invalid"
            reason = "it is not a JSON-RPC message" if is_json else first["msg"]
            failure = ErrorData(code=PARSE_ERROR, message=reason)
    if b'"jsonrpc"' not in line or b'"method"' in line:
        return None
    found = _ID.search(line[:_ID_BYTES]) or _ID.search(line[-_ID_BYTES:])
    if found is None:
        return None
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=json.loads(found[1]), error=failure))


async def _write(stream: asyncio.StreamWriter, outgoing: Any) -> None:
    async for message in outgoing:
        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        stream.write(text.encode() + b"\n")
        try:
            await stream.drain()
        except ConnectionError:
            return  # the server exited, which `_read` detects


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close standard input, then send SIGTERM, then kill everything in its group."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    await end_group(process, (signal.SIGTERM,), _END_SECONDS)
    # An unread pipe keeps the transport alive, and no public method closes it.
    process._transport.close()  # type: ignore[attr-defined]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_SECONDS)

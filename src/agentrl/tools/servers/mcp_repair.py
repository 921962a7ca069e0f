"""Repairs server messages that are almost valid JSON.

If a server written in JavaScript truncates a text in the middle of an emoji, its message contains a
lone surrogate. The SDK's parser then refuses the whole message, and the caller waits forever. Here
the surrogate is replaced with U+FFFD. Servers over pipes may also print lines that are not
messages: these are ignored, and reported once.
"""

import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCResponse,
)
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from agentrl.tools.servers.admission import FAILURE_KEY, excess

logger = logging.getLogger(__name__)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_MAX_SURROGATES = 100_000
_MAX_BACKSLASHES = 1_000
_ID_BYTES = 1_000
"""Servers write a message's id before the result or after it."""
_RESPONSE_ID = re.compile(r'"id"\s*:\s*(\d+|"[^"\\]{1,64}")')


def repaired(data: bytes) -> bytes:
    """Return JSON text with every lone surrogate replaced by U+FFFD.

    Text with implausibly many surrogates or backslashes, meant to slow down the repair, is returned
    unchanged.
    """
    parts: list[bytes] = []
    end_of_last = num_found = 0
    for match in _SURROGATE.finditer(data):
        start = match.start()
        if start < end_of_last:
            continue  # the second half of a pair
        num_found += 1
        backslashes = 0
        while start > backslashes and data[start - backslashes - 1] == ord("\\"):
            backslashes += 1
            if backslashes > _MAX_BACKSLASHES:
                return data
        if num_found > _MAX_SURROGATES:
            return data
        if backslashes % 2:
            continue  # an escaped backslash followed by text that looks like an escape
        if pair := _PAIR.match(data, start):
            parts.append(data[end_of_last : pair.end()])
            end_of_last = pair.end()
            continue
        parts += (data[end_of_last:start], rb"\ufffd")
        end_of_last = match.end()
    return b"".join([*parts, data[end_of_last:]]) if parts else data


async def repaired_lines(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    """Repair a stream of lines, however it is cut into chunks.

    Args:
        chunks: the stream.
        longest: in bytes; longer lines are passed on without waiting for their end.
    """
    pending: list[bytes] = []
    num_pending = 0
    async for chunk in chunks:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end or num_pending > longest:
            yield repaired(b"".join([*pending, chunk[:end]]))
            pending, num_pending = [], 0
        pending.append(chunk[end:])
        num_pending += len(chunk) - end
    yield repaired(b"".join(pending))


@asynccontextmanager
async def repairing(
    transport: Transport, server: str, on_message: Callable[[JSONRPCMessage], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a transport's streams, with incoming messages repaired.

    Args:
        transport: of the SDK's client.
        server: its name, for the log.
        on_message: called with every message that is passed on.
    """
    # The SDK logs a traceback for every line that is not a message; `_RepairedStream` warns once.
    # Adding the same filter again has no effect.
    logging.getLogger("mcp.client.stdio").addFilter(_is_not_a_parse_failure)
    async with transport as (read_stream, write_stream):
        yield _RepairedStream(read_stream, server, on_message), write_stream


class _RepairedStream:
    """A read stream of the SDK that repairs and parses messages that the SDK could not parse.

    Written against mcp 2: the SDK passes a line that it cannot parse on as a `ValidationError`, and
    reads through the methods below. Its own protocol for this is private.
    """

    def __init__(
        self, inner: Any, server: str, on_message: Callable[[JSONRPCMessage], None]
    ) -> None:
        self._inner = inner
        self._server = server
        self._on_message = on_message
        self._has_warned = False

    @property
    def last_context(self) -> Any:
        """The sender's context of the last message, an attribute of the SDK's own streams."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return self._notify(self._repair(await self._inner.receive()))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._notify(self._repair(await self._inner.__anext__()))

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_val, exc_tb)

    def _notify(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        if isinstance(item, SessionMessage):
            self._on_message(item.message)
        return item

    def _repair(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        if isinstance(item, SessionMessage):
            return _within_limits(item)
        if not isinstance(item, ValidationError):
            return item
        line = _line_text(item)
        try:
            message = jsonrpc_message_adapter.validate_json(repaired(line.encode()), by_name=False)
        except ValueError:
            return self._unreadable(line, item)
        return _within_limits(SessionMessage(message))

    def _unreadable(self, line: str, error: Exception) -> SessionMessage | Exception:
        """Return an error response for the call that an invalid line belongs to, if any."""
        id_ = _response_id(line)
        if id_ is not None:
            failure = ErrorData(code=PARSE_ERROR, message="the response cannot be parsed")
            return SessionMessage(JSONRPCError(jsonrpc="2.0", id=id_, error=failure))
        if not self._has_warned:
            logger.warning(
                "%s: ignoring output that is not an MCP message: %.80r", self._server, line
            )
        self._has_warned = True
        return error


def _within_limits(item: SessionMessage) -> SessionMessage:
    """Return a message, or an error in place of one that exceeds the limits."""
    message = item.message
    reason = excess(message.result) if isinstance(message, JSONRPCResponse) else None
    if reason is None:
        return item
    assert isinstance(message, JSONRPCResponse)
    return _too_large(message.id, reason)


def refused_line(line: bytes, reason: str) -> SessionMessage | ValueError:
    """Return the error in place of a response that exceeds the parsing limits."""
    ends = line[:_ID_BYTES], line[-_ID_BYTES:]
    match = next(
        filter(None, (_RESPONSE_ID.search(end.decode(errors="replace")) for end in ends)), None
    )
    return ValueError(reason) if match is None else _too_large(json.loads(match[1]), reason)


def _too_large(id_: str | int, reason: str) -> SessionMessage:
    error = ErrorData(code=INTERNAL_ERROR, message=reason, data={FAILURE_KEY: "too_large"})
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=id_, error=error))


def _is_not_a_parse_failure(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to parse JSONRPC message")


def _response_id(line: str) -> str | int | None:
    """Return the id of the request that an unreadable message responds to, if any."""
    if '"jsonrpc"' not in line:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        match = _RESPONSE_ID.search(line)
        id_ = None if match is None else json.loads(match[1])
    else:
        is_response = isinstance(message, dict) and "method" not in message
        id_ = message.get("id") if is_response else None
    return id_ if isinstance(id_, str | int) else None


def _line_text(error: ValidationError) -> str:
    """Return the text that could not be parsed."""
    text = error.errors(include_url=False)[0]["input"]
    return text if isinstance(text, str) else json.dumps(text)

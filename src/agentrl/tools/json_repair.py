"""Messages of servers that are not quite JSON, repaired where it is plain what was meant.

JavaScript's servers write a text that was cut in the middle of an emoji as it is, with half of a
surrogate pair. The SDK's parser refuses the whole message, and whoever waits for it waits in vain.
Here the half becomes U+FFFD. Servers over pipes may also print what is no message at all: it is
skipped, and reported once.
"""

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, TransportStreams

logger = logging.getLogger(__name__)

_SUSPICIOUS = re.compile(rb"\\u[dD][89a-fA-F]")
# Whole pairs and all other escapes are consumed, so that what is left are halves, and no escaped
# backslash is taken for the beginning of one.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_ANSWERED = re.compile(r'"id"\s*:\s*(\d+|"[^"\\]{1,64}")')


def repaired(data: bytes) -> bytes:
    """Return JSON text with every half of a surrogate pair replaced by U+FFFD."""
    if _SUSPICIOUS.search(data) is None:
        return data
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], data)


async def repaired_lines(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    """Mend a stream of lines.

    Args:
        chunks: the stream.
        longest: lines that are longer, in bytes, are passed on as they are.
    """
    held: list[bytes] = []
    num_held = 0
    async for chunk in chunks:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end or num_held > longest:
            yield repaired(b"".join([*held, chunk[:end]]))
            held, num_held = [], 0
        held.append(chunk[end:])
        num_held += len(chunk) - end
    yield repaired(b"".join(held))


@asynccontextmanager
async def repairing(transport: Transport, what: str) -> AsyncIterator["TransportStreams"]:
    """Speak over a transport whose parser gives up on what can be repaired; `what` names it."""
    async with transport as (read_stream, write_stream):
        yield _RepairedStream(read_stream, what), write_stream


class _RepairedStream:
    """A stream of messages, in which those that could not be parsed are parsed after all."""

    def __init__(self, inner: "ReadStream[SessionMessage | Exception]", what: str) -> None:
        self._inner = inner
        self._what = what
        self._has_complained = False

    @property
    def last_context(self) -> Any:
        """The context of the last message's sender, as the SDK's own streams have it."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return self._read(await self._inner.receive())

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._read(await self._inner.__anext__())

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc_val, exc_tb)

    def _read(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        if not isinstance(item, ValidationError):
            return item
        line = _line_of(item)
        try:
            message = jsonrpc_message_adapter.validate_json(repaired(line.encode()), by_name=False)
        except ValueError:
            return self._unreadable(line, item)
        return SessionMessage(message)

    def _unreadable(self, line: str, error: Exception) -> SessionMessage | Exception:
        """Return the failure of the call that a line was to answer, if it was to answer one."""
        id_ = _answered(line)
        if id_ is not None:
            failure = ErrorData(code=PARSE_ERROR, message="the answer cannot be parsed")
            return SessionMessage(JSONRPCError(jsonrpc="2.0", id=id_, error=failure))
        if not self._has_complained:
            logger.warning(
                "%s prints what is no MCP message and is skipped: %.80r", self._what, line
            )
        self._has_complained = True
        return error


def _answered(line: str) -> str | int | None:
    """Return the id of the request that an unreadable message answers, if it answers one."""
    if '"jsonrpc"' not in line:
        return None
    try:
        message = json.loads(line)
    except ValueError:
        found = _ANSWERED.search(line)
        id_ = None if found is None else json.loads(found[1])
    else:
        is_answer = isinstance(message, dict) and "method" not in message
        id_ = message.get("id") if is_answer else None
    return id_ if isinstance(id_, str | int) else None


def _line_of(error: ValidationError) -> str:
    """Return the text that could not be parsed."""
    given = error.errors(include_url=False)[0]["input"]
    return given if isinstance(given, str) else json.dumps(given)


def _is_noise(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to parse JSONRPC message")


# The SDK writes a traceback for every line that is no message; `_RepairedStream` says it in one.
logging.getLogger("mcp.client.stdio").addFilter(_is_noise)

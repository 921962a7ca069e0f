"""Why scoring failed: a transient outage, or a permanent defect of the function.

Input: the exception or return value of a scoring function. Output: the matching error of
`agentrl.errors`.
"""

import contextlib
import math
import socket
import traceback
from collections.abc import Iterator
from typing import SupportsFloat

import httpx

from agentrl.config.user_code import users_place
from agentrl.errors import AgentRLError, ScorerDefect, ScoringError

_OUTAGES = (ScoringError, ConnectionError, TimeoutError, socket.gaierror, httpx.TransportError)
_BUSY = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 after which the same request may succeed."""


def as_scoring_error(error: Exception, what: str) -> AgentRLError:
    """Classify the exception of a scoring function; errors of AgentRL are returned unchanged."""
    if isinstance(error, AgentRLError):
        return error
    name = type(error).__name__
    message = " ".join(str(error).split())
    text = f"{what} failed: {name}: {message}".rstrip(": ")
    if any(map(_is_outage, _causes(error))):
        return ScoringError(text)
    position = users_place(traceback.extract_tb(error.__traceback__))
    return ScorerDefect(f"{text} ({position})", kind=f"{what}: {name} at {position}")


def as_number(value: object, what: str) -> float:
    """Return the result of a scoring function as a finite float; NumPy scalars are accepted."""
    # `SupportsFloat` covers everything that `float` accepts except text; arrays claim to support
    # it.
    returned = type(value).__name__
    with contextlib.suppress(TypeError):
        number = float(value) if isinstance(value, SupportsFloat) else None
        if number is not None and math.isfinite(number):
            return number
        returned = returned if number is None else str(number)
    text = f"{what} returned {returned}, not a number"
    raise ScorerDefect(text, kind=text)


def _is_outage(error: BaseException) -> bool:
    """Return whether an error of any client library shows that a network or a server is down."""
    if isinstance(error, _OUTAGES):
        return True
    # `status_code` of OpenAI's errors, `response.status_code` of those of httpx and requests.
    status = getattr(error, "status_code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and (status >= 500 or status in _BUSY)


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__

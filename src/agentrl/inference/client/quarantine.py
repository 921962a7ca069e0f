"""Finds requests that crash servers, and stops sending them.

A request that kills its server would kill the next one, too. Other requests in flight lose the same
server; retries therefore start one after the other, each once the previous one has proved harmless.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from agentrl.errors import InferenceError, PoisonousRequest, ServerLost, ServerRefused
from agentrl.inference.wire import GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

_PROBATION_SECONDS = 0.5
"""How long a retry runs alone. Requests that crash servers do so with their first tokens."""
_MAX_DEATHS = 3
"""Server deaths after which a request counts as their cause even without proof."""
_MAX_REASONS = 1000


class Quarantine:
    """The requests that a process no longer sends, whatever their seeds."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self.probation = asyncio.Lock()

    def trial(self, request: GenerateRequest) -> "Trial":
        """Return the trial of a request."""
        reason = self._reasons and self._reasons.get(_fingerprint(request))
        if reason:
            raise PoisonousRequest(reason)
        return Trial(self, request)

    def add(self, request: GenerateRequest, error: InferenceError) -> PoisonousRequest:
        """Put a request in quarantine; return the error to raise."""
        reason = f"this request crashes servers, so it is not sent again ({error})"
        logger.error("%s: %s", reason, request.sampling)
        self._reasons[_fingerprint(request)] = reason
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)
        return PoisonousRequest(reason)


class Trial:
    """The attempts to send one request, and the servers that died under it."""

    def __init__(self, quarantine: Quarantine, request: GenerateRequest) -> None:
        self._quarantine = quarantine
        self._request = request
        self._num_deaths = 0
        self._is_watched = False

    async def send(
        self,
        generate: Callable[[], Coroutine[Any, Any, GenerateResult]],
        ready: Callable[[], Awaitable[object]],
    ) -> GenerateResult:
        """Send the request once."""
        try:
            return await (self._send_alone(generate, ready) if self._num_deaths else generate())
        except (ServerLost, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.status != 500:
                raise
            self._num_deaths += 1
            if self._is_watched or self._num_deaths >= _MAX_DEATHS:
                raise self._quarantine.add(self._request, error) from error
            raise

    async def _send_alone(
        self,
        generate: Callable[[], Coroutine[Any, Any, GenerateResult]],
        ready: Callable[[], Awaitable[object]],
    ) -> GenerateResult:
        async with self._quarantine.probation:
            await ready()
            self._is_watched = True
            generating = asyncio.create_task(generate())
            try:
                await asyncio.wait({generating}, timeout=_PROBATION_SECONDS)
            except asyncio.CancelledError:
                generating.cancel()
                raise
        self._is_watched = generating.done()
        try:
            return await generating
        finally:
            generating.cancel()


def _fingerprint(request: GenerateRequest) -> bytes:
    sampling = request.sampling.model_copy(update={"seed": None})
    parameters = f"{sampling!r} {request.image_data}".encode(errors="replace")
    return hashlib.blake2b(request.input_ids.tobytes() + parameters, digest_size=16).digest()

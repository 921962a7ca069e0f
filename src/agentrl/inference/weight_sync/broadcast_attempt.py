"""Servers that are brought to a version in step, and what is said to each of them for it."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentrl.errors import InferenceError, ServerRefused
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.server_update import PauseMode, resume, supported_mode
from agentrl.inference.wire import MIXED_LABEL

_LEAVE_SECONDS = 3.0
"""How long is tried to tidy up after a broadcast that failed."""
_NOT_FOUND = 404


@dataclass
class Attempt:
    """One try to bring servers to a version."""

    servers: dict[str, SGLangClient]
    """Those that are still in it."""
    end: float
    """When its time is over, on the monotonic clock."""
    lost: dict[str, InferenceError] = field(default_factory=dict)
    """Those that are not, and why."""

    @property
    def seconds(self) -> float:
        """Time that is left."""
        return max(self.end - time.monotonic(), 0.001)

    def lose(self, name: str, error: InferenceError) -> None:
        """Take a server out."""
        del self.servers[name]
        self.lost[name] = error

    async def each(
        self,
        operation: Callable[[str, SGLangClient], Awaitable[None]],
        seconds: float | None = None,
    ) -> bool:
        """Do something with every server; those that fail or are too slow are lost.

        Args:
            operation: called with the id of a server and its routes.
            seconds: bound; all the time that is left when not given.

        Returns:
            Whether none was lost.
        """
        bound = seconds or self.seconds
        count = len(self.servers)
        servers = list(self.servers.items())
        await asyncio.gather(*(self._one(*server, operation, bound) for server in servers))
        return len(self.servers) == count

    async def _one(
        self,
        name: str,
        client: SGLangClient,
        operation: Callable[[str, SGLangClient], Awaitable[None]],
        seconds: float,
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                await operation(name, client)
        except InferenceError as error:
            self.lose(name, error)
        except TimeoutError:
            self.lose(name, InferenceError(f"{client.base_url} took too long for new weights"))


async def open_update(client: SGLangClient, mode: PauseMode) -> None:
    """Pause a server and have it take weights; what it holds from now on is of no version."""
    await client.pause(await supported_mode(client, mode))
    await client.update_weight_version(MIXED_LABEL)
    try:
        await _unless_unknown(client.begin_weight_update())
    except ServerRefused:
        # Left open by an attempt that failed, or by a trainer that died.
        await client.end_weight_update()
        await client.begin_weight_update()


async def close_update(client: SGLangClient, group: str) -> None:
    """Have a server go on with weights that are whole."""
    await _unless_unknown(client.end_weight_update())
    await client.destroy_weights_update_group(group)
    await resume(client)


async def give_up_group(client: SGLangClient, group: str) -> None:
    """Have a server forget a group that is of no use any more, if it was ever in it."""
    with contextlib.suppress(InferenceError, TimeoutError):
        async with asyncio.timeout(_LEAVE_SECONDS):
            await client.destroy_weights_update_group(group)


async def leave_paused(client: SGLangClient) -> None:
    """End what a server has in flight; nothing is sampled there before it has whole weights."""
    with contextlib.suppress(InferenceError, TimeoutError):
        async with asyncio.timeout(_LEAVE_SECONDS):
            await client.abort()
            await _unless_unknown(client.end_weight_update())


async def _unless_unknown(call: Awaitable[None]) -> None:
    """Call a route that SGLang has since 0.5.20 or so; those before do without."""
    try:
        await call
    except ServerRefused as error:
        if error.status != _NOT_FOUND:
            raise

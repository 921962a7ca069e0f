"""How the weights of a version reach the servers.

A `Delivery` knows the way (files, broadcast); the publisher knows which servers there are and what
becomes of those that fail.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from agentrl.config.sections import PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.server_update import bring_to
from agentrl.schema import Policy

Settled = Callable[[str, float | InferenceError], Awaitable[None]]
"""Told the id of a server and for how many seconds it was paused, or why it has to go."""


class Delivery(Protocol):
    """One way to the servers."""

    needs_files: bool
    """Whether the version's directory has to be there before."""

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], settled: Settled
    ) -> None:
        """Bring servers to a version.

        Args:
            policy: the version.
            servers: control routes by the id of the server.
            settled: awaited once for every server, as soon as its part is over; errors of servers
                are told this way and not raised.
        """


class FileDelivery:
    """Every server reads the version's directory, each at its own pace."""

    needs_files = True

    def __init__(self, publish: PublishSection) -> None:
        self._publish = publish

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], settled: Settled
    ) -> None:
        """See `Delivery.deliver`; the directory has to be there."""
        await asyncio.gather(
            *(self._update(name, client, policy, settled) for name, client in servers.items())
        )

    async def _update(
        self, name: str, client: SGLangClient, policy: Policy, settled: Settled
    ) -> None:
        outcome: float | InferenceError
        try:
            outcome = await bring_to(client, policy, self._publish)
        except InferenceError as error:
            outcome = error
        await settled(name, outcome)

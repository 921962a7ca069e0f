"""How the weights of a version reach the servers: the protocol, and delivery through files.

A `Delivery` knows one way to the servers; the publisher knows the servers and handles those that
fail. To add a way, write one module with one class; follow the example of `BroadcastDelivery`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from agentrl.config.sections import PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.server_operations import update_to_policy
from agentrl.schema import Policy

OnOutcome = Callable[[str, float | InferenceError], Awaitable[None]]
"""Awaited with the id of a server and either the seconds for which it was paused or its error."""


class Delivery(Protocol):
    """One way to the servers."""

    @property
    def needs_files(self) -> bool:
        """Whether the version's directory must be written before `deliver`."""
        ...

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """Bring servers to a version."""


class DiskDelivery:
    """Every server reads the version's directory, each at its own pace."""

    needs_files = True

    def __init__(self, publish: PublishSection) -> None:
        self._publish = publish

    async def deliver(
        self, policy: Policy, servers: Mapping[str, SGLangClient], on_outcome: OnOutcome
    ) -> None:
        """See `Delivery.deliver`."""
        await asyncio.gather(
            *(
                report(name, update_to_policy(client, policy, self._publish), on_outcome)
                for name, client in servers.items()
            )
        )


async def report(name: str, operation: Awaitable[float], on_outcome: OnOutcome) -> None:
    """Await an operation on a server and report the seconds that it returns, or its error."""
    outcome: float | InferenceError
    try:
        outcome = await operation
    except InferenceError as error:
        outcome = error
    await on_outcome(name, outcome)

"""What a keeper does for a server that takes turns with the trainer on one device (`--colocated`).

The trainer puts servers to sleep and wakes them. One that sleeps while no trainer has the device
is woken here. One that failed on the way is started again, since nobody knows what memory it holds,
and nothing is started while the trainer has the device.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from agentrl.errors import InferenceError, ServerUnusable, StoreError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.server_operations import wake
from agentrl.schema import InferenceService, Policy
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""Beyond the publisher's own bound on a server's way to sleep or from it."""


class DeviceSharing:
    """One server's share of a device: when it may start, when it sleeps, and who wakes it.

    Args:
        store: says who has the device, and what the server was told to do.
        latest_files: returns the newest published version, with its files there for a while.
        timeout_seconds: bound of the trainer's publisher on one server.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        latest_files: Callable[[float], Awaitable[Policy | None]],
        timeout_seconds: float,
    ) -> None:
        self._store = store
        self._latest_files = latest_files
        self._timeout_seconds = timeout_seconds
        self._updating_since: float | None = None
        self._is_down_by_keeper = False

    def start_anew(self) -> None:
        """Forget what was: the server was started, and has all of its memory."""
        self._updating_since, self._is_down_by_keeper = None, False

    def note_taken_out(self) -> None:
        """Take note that the keeper took the server out, which so has all of its memory."""
        self._is_down_by_keeper = True

    async def until_device_is_free(self, stop: asyncio.Event) -> None:
        """Wait while a trainer computes on the device that the server takes, or until `stop`."""
        while not stop.is_set():
            try:
                if not await self._store.trainer_leases.holder_has_device():
                    return
            except StoreError as error:
                logger.warning("the start is put off: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def is_awake(self, client: SGLangClient, service: InferenceService) -> bool:
        """Return whether the server has its memory; wake it where its trainer is gone.

        Args:
            client: of the server, which answers.
            service: what the store says of it.

        Raises:
            ServerUnusable: nobody knows what memory it has.
        """
        if service.status == "updating":
            now = time.monotonic()
            self._updating_since = self._updating_since or now
            if now - self._updating_since > self._timeout_seconds + _GRACE_SECONDS:
                raise ServerUnusable("it was left on its way to sleep, or from it")
            return False
        self._updating_since = None
        if service.status == "asleep":
            await self._wake_if_left(client, service)
            return False
        if service.status == "up":
            self._is_down_by_keeper = False
        elif not self._is_down_by_keeper:
            raise ServerUnusable(f"it was taken out: {service.error}")
        return True

    async def _wake_if_left(self, client: SGLangClient, service: InferenceService) -> None:
        if await self._store.trainer_leases.holder_has_device():
            return
        if not await self._store.services.claim_sleeping(service.id):
            return  # the next trainer's publisher was first
        logger.warning("server %s sleeps, and its trainer is gone; waking it", service.base_url)
        try:
            policy = await self._latest_files(self._timeout_seconds)
            if policy is None:
                raise InferenceError("no version is published")
            await wake(client, policy, timeout_seconds=self._timeout_seconds)
        except InferenceError as error:
            raise ServerUnusable(f"it did not wake up: {error}") from error
        await self._store.services.set_status(
            service.id, status="up", policy_version=policy.version
        )

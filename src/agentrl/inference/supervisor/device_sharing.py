"""Supervision of a server that takes turns with the trainer on one device (`--colocated`).

The trainer puts servers to sleep and wakes them. This module wakes a server that is asleep although
no trainer has acquired the device. A server that failed while going to sleep or waking up is
restarted, because it is unknown what memory it holds. No server starts while the trainer has the
device.
"""

import asyncio
import logging
import time

from agentrl.errors import InferenceError, ServerUnusable, StoreError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.publisher import latest_files
from agentrl.inference.weight_sync.server_operations import wake
from agentrl.schema import InferenceService
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""Added to the publisher's own timeout for putting a server to sleep or waking it."""


class DeviceSharing:
    """One server's turns on a device: when it may start, whether it is asleep, and who wakes it.

    Args:
        store: records whether the trainer has the device, and the instructions for the server.
        timeout_seconds: the publisher's timeout for one server.
    """

    def __init__(self, store: TrajectoryStore, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._updating_since: float | None = None
        self._is_down_by_supervisor = False

    def reset(self) -> None:
        """Reset the state: the server was just started and has all of its memory."""
        self._updating_since, self._is_down_by_supervisor = None, False

    def note_taken_out(self) -> None:
        """Record that the supervisor, not the trainer, took the server out; it has its memory."""
        self._is_down_by_supervisor = True

    async def until_free(self, stop: asyncio.Event) -> None:
        """Wait while a trainer has acquired the device, or until `stop` is set."""
        while not stop.is_set():
            try:
                if not await self._store.trainer_leases.holder_has_device():
                    return
            except StoreError as error:
                logger.warning("start postponed: %s", error)
            await asyncio.sleep(_POLL_SECONDS)

    async def is_awake(self, client: SGLangClient, service: InferenceService) -> bool:
        """Return whether the server has its memory; start to wake it if its trainer is gone."""
        if service.status == "updating":
            now = time.monotonic()
            self._updating_since = self._updating_since or now
            if now - self._updating_since > self._timeout_seconds + _GRACE_SECONDS:
                raise ServerUnusable("it was left while going to sleep or waking up")
            return False
        self._updating_since = None
        if service.status == "asleep":
            await self._wake_if_abandoned(client, service)
            return False
        if service.status == "up":
            self._is_down_by_supervisor = False
        elif not self._is_down_by_supervisor:
            raise ServerUnusable(f"it was taken out of service: {service.error}")
        return True

    async def _wake_if_abandoned(self, client: SGLangClient, service: InferenceService) -> None:
        if await self._store.trainer_leases.holder_has_device():
            return
        if not await self._store.services.claim_sleeping(service.id):
            return  # the next trainer's publisher claimed it first
        logger.warning("server %s is asleep and its trainer is gone; waking it", service.base_url)
        try:
            policy = await latest_files(self._store, self._timeout_seconds)
            if policy is None:
                raise InferenceError("no version has been published")
            await wake(client, policy, timeout_seconds=self._timeout_seconds)
        except InferenceError as error:
            raise ServerUnusable(f"it did not wake up: {error}") from error
        await self._store.services.set_status(
            service.id, status="up", policy_version=policy.version
        )

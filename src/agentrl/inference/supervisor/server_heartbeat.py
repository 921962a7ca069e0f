"""Registration and heartbeats of one server, from its start to its end.

Every heartbeat compares the store's record of the server with what the server reports. Differences
are repaired, or the server is taken out of service (`down`) until they are. A server that starts
late, comes back or was taken out catches up with the latest version from its files; one that is up
is left to the publisher for a while, because otherwise both would update it at the same time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import (
    InferenceError,
    ServerRefused,
    ServerUnreachable,
    ServerUnusable,
    StoreError,
)
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.server_keys import proof
from agentrl.inference.supervisor.device_sharing import DeviceSharing
from agentrl.inference.weight_sync.publisher import latest_files
from agentrl.inference.weight_sync.server_operations import (
    ServedPolicy,
    served_policy,
    update_to_policy,
)
from agentrl.inference.weight_sync.version_files import is_of_same_run
from agentrl.runtime.installation import package_version
from agentrl.schema import InferenceService, Policy, ServerLoad
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_SECONDS = 1.0
PAUSED_SECONDS = 3.0
"""An `up` server that is paused for this long was forgotten or paused by a third party: publishers
mark their servers `updating` before they pause them.
"""
MISSED_UPDATE_SECONDS = 3.0
"""An `up` server that is behind for this long was missed by the publisher (it registered during a
publication); the publisher itself marks its servers `updating` within milliseconds.
"""
PROBES_PER_HANG = 3
"""Number of probes within the time after which a server counts as hung."""


class ServerHeartbeat:
    """Keeps the store's record of one started server up to date."""

    def __init__(
        self,
        store: TrajectoryStore,
        service_id: str,
        url: str,
        *,
        inference: InferenceSection,
        publish: PublishSection,
        device: DeviceSharing | None,
        is_own: bool,
    ) -> None:
        """Prepare; nothing is registered."""
        self.url = url
        self._store = store
        self._service_id = service_id
        self._inference = inference
        self._publish = publish
        self._device = device
        self._is_own = is_own
        self.is_registered = False
        self._responded_at = 0.0
        self._paused_since: float | None = None
        self._load: ServerLoad | None = None
        self._behind_since: float | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self.newest_adapter: str | None = None
        """The newest adapter seen on the server."""

    async def register(self, client: SGLangClient, model_path: str) -> None:
        """Bring a healthy server to the latest version and register it."""
        served = await self._catch_up(client)
        data_key = self._inference.inference_api_key
        control_key = self._inference.inference_admin_key or data_key
        await self._store.services.register(
            InferenceService(
                id=self._service_id,
                base_url=self.url,
                backend=self._inference.inference_backend,
                model_path=model_path,
                status="up",
                policy_version=served.version,
                adapter=served.adapter,
                data_proof=proof(self.url, data_key),
                control_proof=proof(self.url, control_key),
                takes_priorities=await self._in_probe_time(client.takes_priorities()),
                release=package_version(),
            )
        )
        self.is_registered = True
        self._responded_at = time.monotonic()
        logger.info("server %s is up", self.url)

    async def beat(self, client: SGLangClient) -> None:
        """Beat until cancelled, once the server is registered."""
        try:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                try:
                    await self._beat(client)
                except StoreError as error:
                    logger.warning("heartbeat postponed: %s", error)
        finally:
            for retiring in self._retiring:
                retiring.cancel()

    async def deregister(self, reason: str) -> None:
        """Set the server to `down` if it was ever registered."""
        if self.is_registered:
            await self._store.services.set_status(self._service_id, status="down", error=reason)

    async def _beat(self, client: SGLangClient) -> None:
        service = await self._store.services.heartbeat(self._service_id, load=self._load)
        self._load = None
        policy = await self._store.policies.latest()
        try:
            served = await self._in_probe_time(served_policy(client, policy))
            await self._check_health(client, service)
            if service.status == "up":  # a paused server reports its load from before the pause
                self._load = await self._load_of(client)
        except InferenceError as error:
            await self._handle_silence(service, error)
            return
        self._responded_at = time.monotonic()
        if self._device is not None and not await self._device.is_awake(client, service):
            return
        try:
            if self._was_missed(service, served, policy):
                served = await self._catch_up(client)
            if service.status == "down":
                # The process that took it out of service may have left it paused.
                await client.continue_()
            if service.status == "down" or service.policy_version != served.version:
                await self._store.services.set_status(
                    self._service_id,
                    status="up",
                    policy_version=served.version,
                    adapter=served.adapter,
                )
            await self._retire_adapters(client, served)
            await self._end_forgotten_pause(client, service)
        except InferenceError as error:
            if service.status == "up":
                logger.warning("server %s is taken out of service: %s", self.url, error)
                await self._take_out(service, error)

    async def _check_health(self, client: SGLangClient, service: InferenceService) -> None:
        """Refuse a server started here that answers, but cannot compute."""
        if not self._is_own or service.status == "asleep":
            return
        if not await self._in_probe_time(client.health()):
            raise ServerUnreachable("it reports itself unhealthy; see its log")

    async def _end_forgotten_pause(self, client: SGLangClient, service: InferenceService) -> None:
        """Resume a server that is paused although no publication is in progress."""
        if service.status != "up" or not await client.is_paused():
            self._paused_since = None
            return
        self._paused_since = self._paused_since or time.monotonic()
        seconds = time.monotonic() - self._paused_since
        if self._is_own and seconds > self._inference.server_hang_seconds:
            raise ServerUnusable(f"paused for {seconds:.0f} s, and resuming it failed")
        if seconds > PAUSED_SECONDS:
            message = f"was paused for {seconds:.0f} s without a publication; resumed"
            updated = await self._store.services.heartbeat(self._service_id, error=message)
            if updated.status == "up":  # no publisher has started an update since
                logger.warning("server %s %s", self.url, message)
                await client.continue_()

    async def _take_out(self, service: InferenceService, error: InferenceError) -> None:
        await self._store.services.set_status(self._service_id, status="down", error=str(error))
        if self._device is not None and service.status == "up":
            self._device.note_taken_out()

    async def _handle_silence(self, service: InferenceService, error: InferenceError) -> None:
        """Take a silent server out of service."""
        silent_seconds = time.monotonic() - self._responded_at
        logger.warning("server %s is not responding: %s", self.url, error)
        # A sleeping server receives no requests, and the trainer still has to wake it.
        if service.status not in ("down", "asleep"):
            await self._take_out(service, error)
        if self._is_own and silent_seconds > self._inference.server_hang_seconds:
            raise ServerUnusable(f"silent for {silent_seconds:.0f} s")

    async def _catch_up(self, client: SGLangClient) -> ServedPolicy:
        """Bring the server to the latest version; return what it serves then."""
        policy = await latest_files(self._store, self._publish.publish_timeout_seconds)
        served = await self._in_probe_time(served_policy(client, policy))
        if policy is None or served.is_policy(policy):
            return served
        await update_to_policy(client, policy, self._publish)
        self._behind_since = None
        return ServedPolicy(policy.version, policy.adapter)

    def _was_missed(
        self, service: InferenceService, served: ServedPolicy, policy: Policy | None
    ) -> bool:
        """Return whether this supervisor, and not the publisher, must update the server."""
        if policy is None or served.is_policy(policy):
            self._behind_since = None
            return False
        if service.status == "down":
            return True
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        patience_seconds = MISSED_UPDATE_SECONDS
        if service.status != "up":
            # `updating`: the publisher is updating it, with its own timeout.
            patience_seconds += self._publish.publish_timeout_seconds
        return now - self._behind_since > patience_seconds

    async def _retire_adapters(self, client: SGLangClient, served: ServedPolicy) -> None:
        """Start unloading every adapter of the run that is older than the newest two.

        Samplers that have not yet heard of the newest still request the one before it. The server unloads
        an adapter once the generations that use it have ended, without this call waiting for it.
        """
        if served.adapter is None or served.adapter == self.newest_adapter:
            return
        kept = {served.adapter, self.newest_adapter}
        self.newest_adapter = served.adapter
        for name in await client.adapters():
            if name not in kept and is_of_same_run(name, served.adapter):
                retiring = asyncio.create_task(_unload(client, name))
                self._retiring.add(retiring)
                retiring.add_done_callback(self._retiring.discard)

    async def _load_of(self, client: SGLangClient) -> ServerLoad | None:
        """Return how busy the server is; None without such a route, as with some gateways."""
        try:
            return await self._in_probe_time(client.loads())
        except ServerRefused:
            return None

    async def _in_probe_time(self, answer: Awaitable[T]) -> T:
        seconds = self._inference.server_hang_seconds / PROBES_PER_HANG
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise ServerUnreachable(f"no answer within {seconds:g} s") from None


async def _unload(client: SGLangClient, name: str) -> None:
    try:
        await client.unload_adapter(name)
    except InferenceError as error:
        logger.warning("server %s could not unload adapter %s: %s", client.base_url, name, error)

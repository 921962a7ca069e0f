"""Publishes policy versions: announces them in the store and delivers them to every server.

The trainer writes a version's directory, commits its checkpoint, and only then announces the
version: a served version can therefore never be undone by a crash, together with the records it was
trained on. The `Delivery` decides how the weights travel.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.server_keys import with_control_key
from agentrl.inference.weight_sync.delivery import Delivery, DiskDelivery, report
from agentrl.inference.weight_sync.server_operations import put_to_sleep, wake
from agentrl.inference.weight_sync.version_files import (
    AdapterNames,
    checksum,
    remove_old_versions,
    version_dir,
    weight_bytes,
)
from agentrl.runtime.atomic_directory import clear_leftovers
from agentrl.schema import InferenceService, Policy
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

WriteFiles = Callable[[Path], Awaitable[None]]
"""Writes the published weights into a directory."""


@dataclass(frozen=True)
class PublishReport:
    """The outcome of publishing a version to the servers."""

    version: int
    updated: tuple[str, ...] = ()
    """Ids of the servers that serve the version now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of the servers that were taken out of service, by id."""
    paused_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds for which each updated server generated nothing, by id."""


class PolicyPublisher:
    """Publishes the versions below one directory to the registered servers."""

    def __init__(
        self,
        store: TrajectoryStore,
        root: Path,
        *,
        publish: PublishSection,
        inference: InferenceSection,
        delivery: Delivery | None = None,
        adapters: AdapterNames | None = None,
        serves: bool = True,
    ) -> None:
        """Remove leftovers of an interrupted writer below `root`; nothing is published yet.

        Args:
            store: where versions are announced and servers are registered.
            root: directory of the version directories.
            publish: how servers are updated.
            inference: keys of the servers.
            delivery: how weights reach the servers; through files by default.
            adapters: names the versions of a run that trains an adapter (LoRA); None for whole models.
            serves: False for a trainer whose versions are files only, which no server hears of.
        """
        self._store = store
        self._root = root.absolute()
        self._publish = publish
        self._inference = inference
        self._delivery = delivery or DiskDelivery(publish)
        self._adapters = adapters
        self._serves = serves
        self._finishing: asyncio.Task[None] | None = None
        clear_leftovers(self._root)

    def directory(self, version: int) -> Path:
        """Return the directory of a version, written or not."""
        return version_dir(self._root, version)

    @property
    def needs_files(self) -> bool:
        """Whether a version must be written before it is announced."""
        return self._delivery.needs_files or not self._serves

    async def announce(self, version: int, write: WriteFiles | None = None) -> PublishReport:
        """Publish a version in the store, then to all servers that are not down, concurrently.

        A server that fails or times out is set `down` with its error, and the others do not wait
        for it. Having no server up is not an error: servers that start later read the version from
        the store. A server that is `updating` was left so, perhaps paused, by a trainer that died,
        and is updated like the others.

        Args:
            version: number of optimizer steps that produced the weights.
            write: writes the version's directory after the servers have the weights; None if the
                directory is already written.
        """
        directory = self.directory(version)
        await self.settle()
        if not self._serves:
            await self._remove_old(in_use=set())
            return PublishReport(version)
        policy = Policy(
            version=version,
            path=str(directory),
            adapter=None if self._adapters is None else self._adapters.of(version),
            num_bytes=weight_bytes(directory) if write is None else 0,
            is_written=write is None,
        )
        await self._store.policies.publish(policy)
        publish_report = await self._deliver(policy)
        self._finishing = asyncio.create_task(self._finish(policy, write))
        return publish_report

    async def put_to_sleep(self) -> None:
        """Have every server that is not down release its memory; `announce` wakes them again.

        A server that fails or times out is set `down` with its error, as by `announce`.
        """
        services = [s for s in await self._registered() if s.status in ("up", "updating")]
        await asyncio.gather(*map(self._put_to_sleep, services))

    async def settle(self) -> None:
        """Wait until the last version has its checksum and old versions are gone."""
        if self._finishing is not None:
            finishing, self._finishing = self._finishing, None
            await finishing

    async def _finish(self, policy: Policy, write: WriteFiles | None) -> None:
        """Do the work that no server waits for: write and hash the version, remove old ones."""
        directory = Path(policy.path)
        if write is not None:
            await write(directory)
            await self._store.policies.mark_written(policy.version, weight_bytes(directory))
        digest = await asyncio.to_thread(checksum, directory)
        await self._store.policies.set_checksum(policy.version, digest)
        services = await self._store.services.all()
        served = {service.policy_version for service in services if service.status != "down"}
        await self._remove_old(served | await self._store.policies.held_versions())

    async def _deliver(self, policy: Policy) -> PublishReport:
        """Deliver a version to every server that is awake, and wake those that are asleep."""
        registered = [s for s in await self._registered() if s.status != "down"]
        awake = {s.id: s for s in registered if s.status != "asleep"}
        updating = (self._store.services.set_status(name, status="updating") for name in awake)
        await asyncio.gather(*updating)
        services = awake | await self._claim_sleeping(registered)
        outcomes: dict[str, float | InferenceError] = {}
        seconds = self._publish.publish_timeout_seconds

        async def on_outcome(name: str, outcome: float | InferenceError) -> None:
            outcomes[name] = outcome
            if isinstance(outcome, InferenceError):
                await self._take_out(services[name], outcome)
            else:
                await self._store.services.set_status(
                    name, status="up", policy_version=policy.version, adapter=policy.adapter
                )

        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(
                    SGLangClient.of(service.base_url, self._inference)
                )
                for name, service in services.items()
            }
            await asyncio.gather(
                self._delivery.deliver(policy, {name: clients[name] for name in awake}, on_outcome),
                *(
                    report(name, wake(clients[name], policy, timeout_seconds=seconds), on_outcome)
                    for name in services.keys() - awake.keys()
                ),
            )
        paused = {name: value for name, value in outcomes.items() if isinstance(value, float)}
        return PublishReport(
            version=policy.version,
            updated=tuple(paused),
            failed={name: str(value) for name, value in outcomes.items() if name not in paused},
            paused_seconds=paused,
        )

    async def _claim_sleeping(
        self, services: Iterable[InferenceService]
    ) -> dict[str, InferenceService]:
        """Claim the right to wake servers; a supervisor keeps a server it claimed first."""
        return {
            s.id: s
            for s in services
            if s.status == "asleep" and await self._store.services.claim_sleeping(s.id)
        }

    async def _put_to_sleep(self, service: InferenceService) -> None:
        # Recorded first, because a server that is asleep but registered as up would sleep forever.
        await self._store.services.set_status(service.id, status="asleep")
        try:
            async with SGLangClient.of(service.base_url, self._inference) as client:
                await put_to_sleep(
                    client,
                    mode=self._publish.publish_mode,
                    timeout_seconds=self._publish.publish_timeout_seconds,
                )
        except InferenceError as error:
            await self._take_out(service, error)

    async def _take_out(self, service: InferenceService, error: InferenceError) -> None:
        logger.warning("server %s is taken out of service: %s", service.base_url, error)
        await self._store.services.set_status(service.id, status="down", error=str(error))

    async def _registered(self) -> list[InferenceService]:
        """Return the servers that may receive the control key."""
        key = self._inference.inference_admin_key or self._inference.inference_api_key
        return with_control_key(await self._store.services.all(), key)

    async def _remove_old(self, in_use: set[int]) -> None:
        await asyncio.to_thread(
            remove_old_versions, self._root, keep=self._publish.keep_policies, in_use=in_use
        )


async def latest_files(store: TrajectoryStore, seconds: float) -> Policy | None:
    """Return the latest version once its files are written, for a server that was not reached.

    Args:
        store: where versions are announced.
        seconds: timeout of the wait, and how long the files are kept.
    """
    deadline = time.monotonic() + seconds
    while True:
        policy = await store.policies.hold_latest(seconds)
        if policy is None or policy.is_written:
            return policy
        if time.monotonic() > deadline:
            raise InferenceError(
                f"version {policy.version} was not written within {seconds:g} s; the trainer "
                "publishes it again when it is back"
            )
        await asyncio.sleep(0.1)

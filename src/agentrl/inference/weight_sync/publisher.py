"""From weights in the trainer to weights in every server.

`write` makes the version's directory, `announce` tells the store and the servers. Between the two
the trainer commits its checkpoint, so that no version is ever served that a crash would take back
together with the records it was trained on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.http_client import SGLangClient
from agentrl.inference.weight_sync.adapter_names import AdapterNames
from agentrl.inference.weight_sync.delivery import Delivery, FileDelivery, Settled
from agentrl.inference.weight_sync.server_sleep import put_to_sleep, wake
from agentrl.inference.weight_sync.weight_files import (
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
"""Writes the weights that were published into a directory."""


@dataclass(frozen=True)
class PublishReport:
    """How the servers took a new version."""

    version: int
    updated: tuple[str, ...] = ()
    """Ids of the servers that serve it now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Ids of the servers that were taken out -> why."""
    paused_seconds: dict[str, float] = field(default_factory=dict)
    """Ids of the updated servers -> how long they generated nothing."""


class PolicyPublisher:
    """Writes policy versions below one directory and hands them to the registered servers."""

    def __init__(
        self,
        store: TrajectoryStore,
        root: Path,
        *,
        publish: PublishSection,
        inference: InferenceSection,
        delivery: Delivery | None = None,
        adapters: AdapterNames | None = None,
    ) -> None:
        """Set up.

        Args:
            store: where versions are announced and servers are registered.
            root: directory of the version directories.
            publish: how servers are updated.
            inference: keys of the servers.
            delivery: how weights reach the servers; over files when not given.
            adapters: names of the versions where they are adapters; None where they are whole.
        """
        self._store = store
        self._root = root.absolute()
        self._publish = publish
        self._inference = inference
        self._delivery = delivery or FileDelivery(publish)
        self._adapters = adapters
        self._filing: asyncio.Task[None] | None = None
        clear_leftovers(self._root)

    def directory(self, version: int) -> Path:
        """Return where a version is (to be) written."""
        return version_dir(self._root, version)

    @property
    def needs_files(self) -> bool:
        """Whether a version has to be written before it is announced."""
        return self._delivery.needs_files

    async def announce(self, version: int, write: WriteFiles | None = None) -> PublishReport:
        """Publish a version: in the store, then to every server that is not down, at once.

        A server that fails or is too slow is set down with its error; it is not waited for. That
        no server is up is no error: those that come later take the version from the store. One
        that is `updating` was left so, and maybe paused, by a trainer that died: it is taken up.

        Args:
            version: optimizer steps behind the weights.
            write: writes the version's directory, once the servers have the weights; None where
                it is written already.

        Raises:
            StoreError: the store could not be told. No server was changed then.
        """
        directory = self.directory(version)
        await self.settle()
        policy = Policy(
            version=version,
            path=str(directory),
            adapter=None if self._adapters is None else self._adapters.of(version),
            num_bytes=weight_bytes(directory) if write is None else 0,
            is_written=write is None,
        )
        await self._store.policies.publish(policy)
        report = await self._hand_out(policy)
        self._filing = asyncio.create_task(self._file(policy, write))
        return report

    async def put_to_sleep(self) -> None:
        """Have every server that is not down give its memory up; `announce` wakes it.

        A server that fails or is too slow is set down with its error, as by `announce`.

        Raises:
            StoreError: the store could not be told.
        """
        services = [s for s in await self._store.services.all() if s.status in ("up", "updating")]
        await asyncio.gather(*map(self._put_to_sleep, services))

    async def settle(self) -> None:
        """Wait until the last version has its checksum and old versions are gone.

        Raises:
            StoreError: the store could not be told.
        """
        if self._filing is not None:
            filing, self._filing = self._filing, None
            await filing

    async def _file(self, policy: Policy, write: WriteFiles | None) -> None:
        """Do what nobody waits for: write and hash what was published, remove old versions."""
        directory = Path(policy.path)
        if write is not None:
            await write(directory)
            await self._store.policies.mark_written(policy.version, weight_bytes(directory))
        digest = await asyncio.to_thread(checksum, directory)
        await self._store.policies.set_checksum(policy.version, digest)
        await self._remove_old()

    async def _hand_out(self, policy: Policy) -> PublishReport:
        """Deliver a version to every server that is not down, and wake those that sleep."""
        registered = [s for s in await self._store.services.all() if s.status != "down"]
        awake = {s.id: s for s in registered if s.status != "asleep"}
        updating = (self._store.services.set_status(name, status="updating") for name in awake)
        await asyncio.gather(*updating)
        services = awake | await self._claim_sleeping(registered)
        outcomes: dict[str, float | InferenceError] = {}

        async def settled(name: str, outcome: float | InferenceError) -> None:
            outcomes[name] = outcome
            if isinstance(outcome, InferenceError):
                logger.warning("server %s is taken out: %s", services[name].base_url, outcome)
                await self._store.services.set_status(name, status="down", error=str(outcome))
            else:
                await self._store.services.set_status(
                    name, status="up", policy_version=policy.version, adapter=policy.adapter
                )

        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(self._client(service))
                for name, service in services.items()
            }
            await asyncio.gather(
                self._delivery.deliver(policy, {name: clients[name] for name in awake}, settled),
                *(
                    self._wake(name, clients[name], policy, settled)
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
        """Return the sleeping ones that are this publisher's to wake, and not their keepers'."""
        return {
            s.id: s
            for s in services
            if s.status == "asleep" and await self._store.services.claim_sleeping(s.id)
        }

    async def _wake(
        self, name: str, client: SGLangClient, policy: Policy, settled: Settled
    ) -> None:
        outcome: float | InferenceError
        try:
            outcome = await wake(
                client, policy, timeout_seconds=self._publish.publish_timeout_seconds
            )
        except InferenceError as error:
            outcome = error
        await settled(name, outcome)

    async def _put_to_sleep(self, service: InferenceService) -> None:
        # Told first: a server that is asleep and said to be up would stay asleep for ever.
        await self._store.services.set_status(service.id, status="asleep")
        try:
            async with self._client(service) as client:
                await put_to_sleep(
                    client,
                    mode=self._publish.publish_mode,
                    timeout_seconds=self._publish.publish_timeout_seconds,
                )
        except InferenceError as error:
            logger.warning("server %s is taken out: %s", service.base_url, error)
            await self._store.services.set_status(service.id, status="down", error=str(error))

    def _client(self, service: InferenceService) -> SGLangClient:
        return SGLangClient(
            service.base_url,
            api_key=_secret(self._inference.inference_api_key),
            admin_key=_secret(self._inference.inference_admin_key),
        )

    async def _remove_old(self) -> None:
        services = await self._store.services.all()
        served = {service.policy_version for service in services if service.status != "down"}
        in_use = served | await self._store.policies.held_versions()
        await asyncio.to_thread(
            remove_old_versions, self._root, keep=self._publish.keep_policies, in_use=in_use
        )


class PolicyFiles:
    """Writes policy versions below one directory, for a trainer that publishes nothing."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root.absolute()
        self._keep = keep
        clear_leftovers(self._root)

    def directory(self, version: int) -> Path:
        """Return where a version is (to be) written."""
        return version_dir(self._root, version)

    @property
    def needs_files(self) -> bool:
        """Always: nothing else comes of an announcement."""
        return True

    async def announce(self, version: int, write: WriteFiles | None = None) -> PublishReport:
        """Tell nobody, and remove old versions."""
        await asyncio.to_thread(remove_old_versions, self._root, keep=self._keep, in_use=set())
        return PublishReport(version=version)

    async def settle(self) -> None:
        """Return at once: everything was done in `announce`."""


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value is not None else None

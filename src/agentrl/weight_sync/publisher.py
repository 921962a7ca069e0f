"""From weights in the trainer to weights in every server.

`write` makes the version's directory, `announce` tells the store and the servers. Between the two
the trainer commits its checkpoint, so that no version is ever served that a crash would take back
together with the records it was trained on.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client import SGLangClient
from agentrl.schema import InferenceService, Policy
from agentrl.store import TrajectoryStore
from agentrl.weight_sync.files import checksum, clear_leftovers, remove_old_versions, version_dir
from agentrl.weight_sync.update import update_server

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishReport:
    """How the servers took a new version."""

    version: int
    updated: tuple[str, ...] = ()
    """Ids of the servers that serve it now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Ids of the servers that were taken out -> why."""


class PolicyPublisher:
    """Writes policy versions below one directory and hands them to the registered servers."""

    def __init__(
        self,
        store: TrajectoryStore,
        root: Path,
        *,
        publish: PublishSection,
        inference: InferenceSection,
    ) -> None:
        self._store = store
        self._root = root.absolute()
        self._publish = publish
        self._inference = inference
        clear_leftovers(self._root)

    def directory(self, version: int) -> Path:
        """Return where a version is (to be) written."""
        return version_dir(self._root, version)

    async def announce(self, version: int) -> PublishReport:
        """Publish a written version: in the store, then to every server that is not down, at once.

        A server that fails or is too slow is set down with its error; it is not waited for. That
        no server is up is no error: those that come later take the version from the store. One
        that is `updating` was left so, and maybe paused, by a trainer that died: it is taken up.

        Raises:
            StoreError: the store could not be told. No server was changed then.
        """
        directory = self.directory(version)
        digest, num_bytes = await asyncio.to_thread(checksum, directory)
        policy = Policy(version=version, path=str(directory), checksum=digest, num_bytes=num_bytes)
        await self._store.publish_policy(policy)
        services = [s for s in await self._store.services() if s.status != "down"]
        errors = await asyncio.gather(*(self._update(service, policy) for service in services))
        report = PublishReport(
            version=version,
            updated=tuple(s.id for s, error in zip(services, errors, strict=True) if error is None),
            failed={s.id: e for s, e in zip(services, errors, strict=True) if e is not None},
        )
        await self._remove_old()
        return report

    async def _update(self, service: InferenceService, policy: Policy) -> str | None:
        """Update one server and return why it failed, None when it did not."""
        await self._store.set_service(service.id, status="updating")
        try:
            async with SGLangClient(
                service.base_url,
                api_key=_secret(self._inference.inference_api_key),
                admin_key=_secret(self._inference.inference_admin_key),
            ) as client:
                await update_server(
                    client,
                    Path(policy.path),
                    policy.version,
                    mode=self._publish.publish_mode,
                    timeout_seconds=self._publish.publish_timeout_seconds,
                )
        except InferenceError as error:
            logger.warning("server %s is taken out: %s", service.base_url, error)
            await self._store.set_service(service.id, status="down", error=str(error))
            return str(error)
        await self._store.set_service(service.id, status="up", policy_version=policy.version)
        return None

    async def _remove_old(self) -> None:
        services = await self._store.services()
        in_use = {service.policy_version for service in services if service.status != "down"}
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

    async def announce(self, version: int) -> PublishReport:
        """Tell nobody, and remove old versions."""
        await asyncio.to_thread(remove_old_versions, self._root, keep=self._keep, in_use=set())
        return PublishReport(version=version)


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value is not None else None

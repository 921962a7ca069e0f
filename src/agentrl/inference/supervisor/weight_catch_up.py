"""Brings a server to the latest version if the trainer's publisher did not.

A server that starts late, comes back or was taken out catches up from the version's files. A server
that is up is left to the publisher for a while, because otherwise both would
update it at the same time.
"""

import asyncio
import logging
import time

from agentrl.config.sections import PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync.server_operations import ServedPolicy, update_to_policy
from agentrl.inference.weight_sync.version_files import is_of_same_run
from agentrl.schema import InferenceService, Policy
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

MISSED_UPDATE_SECONDS = 3.0
"""An `up` server that is behind for this long was missed by the publisher (it registered during a
publication); the publisher itself marks its servers `updating` within milliseconds.
"""


class WeightCatchUp:
    """Compares the version of one server with the published version."""

    def __init__(self, store: TrajectoryStore, publish: PublishSection) -> None:
        self._store = store
        self._publish = publish
        self._behind_since: float | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self.newest_adapter: str | None = None
        """The newest adapter seen on the server."""

    async def latest_files(self, seconds: float | None = None) -> Policy | None:
        """Return the latest version once its files are written; they are kept for as long.

        Args:
            seconds: timeout of the wait, and how long the files are kept; by default, the
                publisher's timeout for one server.
        """
        seconds = seconds or self._publish.publish_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            policy = await self._store.policies.hold_latest(seconds)
            if policy is None or policy.is_written:
                return policy
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"version {policy.version} was not written within {seconds:g} s; the trainer "
                    "publishes it again when it is back"
                )
            await asyncio.sleep(0.1)

    def was_missed(
        self, service: InferenceService, served: ServedPolicy, policy: Policy | None
    ) -> bool:
        """Return whether the supervisor, and not the publisher, must update the server."""
        if policy is None or served.is_policy(policy):
            self._behind_since = None
            return False
        if service.status == "down":
            return True
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        patience_seconds = MISSED_UPDATE_SECONDS
        if service.status != "up":
            # `updating`: the publisher is updating it, with its own timeout.
            patience_seconds += self._publish.publish_timeout_seconds
        return now - self._behind_since > patience_seconds

    async def catch_up(
        self, client: SGLangClient, policy: Policy | None, served: ServedPolicy
    ) -> ServedPolicy:
        """Bring the server to a version with written files; return the version that it then serves."""
        if policy is None or served.is_policy(policy):
            return served
        await update_to_policy(client, policy, self._publish)
        self._behind_since = None
        return ServedPolicy(policy.version, policy.adapter)

    async def retire_adapters(self, client: SGLangClient, served: ServedPolicy) -> None:
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

    def cancel_retirements(self) -> None:
        """Stop waiting for adapters to be unloaded, because the server is gone."""
        for retiring in self._retiring:
            retiring.cancel()


async def _unload(client: SGLangClient, name: str) -> None:
    try:
        await client.unload_adapter(name)
    except InferenceError as error:
        logger.warning("server %s could not unload adapter %s: %s", client.base_url, name, error)

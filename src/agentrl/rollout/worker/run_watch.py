"""What a sampler knows about its run, refreshed now and then: control, admission, servers."""

import time
from typing import Literal

from agentrl.inference import ServerPool
from agentrl.schema import Run
from agentrl.store import TrajectoryStore

SERVER_SILENCE_SECONDS = 30.0
"""A server that has not been heard of for this long is taken for gone."""

WaitReason = Literal[
    "no_run", "paused", "no_server", "no_task", "no_scoring", "admission", "trouble"
]


class RunWatch:
    """Caches the run document and hands the registered servers to the pool.

    Args:
        store: the trajectory store.
        servers: the pool whose list of servers is kept current.
    """

    def __init__(self, store: TrajectoryStore, servers: ServerPool) -> None:
        self._store = store
        self._servers = servers
        self.run: Run | None = None
        self.num_servers = 0
        self._read_at = float("-inf")
        self._made_at = time.monotonic()
        self._seen_alive = False

    async def refresh(self, max_age_seconds: float) -> None:
        """Read again what was read longer ago than this."""
        if time.monotonic() - self._read_at < max_age_seconds:
            return
        self.run = await self._store.runs.get()
        services = await self._store.services.all(alive_within=SERVER_SILENCE_SECONDS)
        self._servers.update(services)
        self.num_servers = sum(service.status != "down" for service in services)
        self._read_at = time.monotonic()

    @property
    def admitted_groups(self) -> int:
        """Training groups with orders below this may be claimed."""
        return 0 if self.run is None else self.run.admitted_groups

    def run_ended(self, resume_grace_seconds: float) -> bool:
        """Return whether the run is over.

        A run that was over before this process began may be about to be resumed, and gets this
        much time for it.
        """
        if self.run is None or self.run.status not in ("completed", "failed"):
            self._seen_alive = self._seen_alive or self.run is not None
            return False
        return self._seen_alive or time.monotonic() - self._made_at > resume_grace_seconds

    def hold_reason(self) -> WaitReason | None:
        """Return why no slot may be claimed at all, or None."""
        if self.run is None or self.run.status in ("completed", "failed"):
            return "no_run"
        if self.run.control.sampling_paused:
            return "paused"
        if self.num_servers == 0:
            return "no_server"
        return None

    async def idle_reason(self) -> WaitReason:
        """Return why there was nothing to claim."""
        num_groups = await self._store.tasks.next_train_order()
        return "admission" if num_groups > self.admitted_groups else "no_task"

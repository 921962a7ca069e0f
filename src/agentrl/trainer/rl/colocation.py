"""Trainer and servers share one device and use it in turn (`--colocated`).

    servers   sample ─────────┐ asleep                        ┌ sample ───
    trainer   in host memory  └ step, weights and checkpoint ─┘ in host memory

The trainer acquires the device when the batch of its step is ready, and releases it once the new
version is published. Should it die in between, the supervisors wake their servers after its lease
has expired.
"""

from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.store import TrajectoryStore
from agentrl.trainer.learner.worker_group import WorkerGroup


class SharedDevice:
    """The device, as the training loop sees it."""

    def __init__(
        self, store: TrajectoryStore, publisher: PolicyPublisher, group: WorkerGroup
    ) -> None:
        """Begin with the device in the servers' hands.

        Args:
            store: where the supervisors read who has it.
            publisher: puts servers to sleep; its `announce` wakes them.
            group: the one rank, in host memory to begin with.
        """
        self._store = store
        self._publisher = publisher
        self._group = group

    async def acquire(self) -> None:
        """Put the servers to sleep and bring the trainer's state to the device.

        Raises:
            StoreError: the store could not be written.
        """
        await self._store.trainer_leases.set_has_device(True)
        await self._publisher.put_to_sleep()
        await self._group.move(to_device=True)

    async def offload(self) -> None:
        """Move the trainer's state to host memory, which makes room to wake the servers."""
        await self._group.move(to_device=False)

    async def release(self) -> None:
        """Allow the supervisors to start and wake servers again.

        Raises:
            StoreError: the store could not be written.
        """
        await self._store.trainer_leases.set_has_device(False)

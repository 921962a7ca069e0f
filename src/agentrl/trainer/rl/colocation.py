"""Trainer and servers take turns on one device (`--colocated`).

    servers   sample ─────────┐ asleep                        ┌ sample ───
    trainer   in host memory  └ step, weights and checkpoint ─┘ in host memory

The trainer takes the device when the batch of its step is there, and hands it back before the new
version goes out. Should it die in between, the keepers wake their servers once its lease has run out.
"""

from typing import Self

from agentrl.config.sections import RootConfig
from agentrl.inference.weight_sync import PolicyFiles, PolicyPublisher
from agentrl.store import TrajectoryStore
from agentrl.trainer.worker_group import Team


class SharedDevice:
    """The device, as the trainer's loop sees it.

    Args:
        store: where keepers see who has it.
        publisher: puts servers to sleep; its `announce` wakes them.
        team: the one rank, in host memory to begin with.
    """

    def __init__(self, store: TrajectoryStore, publisher: PolicyPublisher, team: Team) -> None:
        self._store = store
        self._publisher = publisher
        self._team = team

    @classmethod
    def of(
        cls,
        config: RootConfig,
        store: TrajectoryStore,
        publisher: PolicyPublisher | PolicyFiles,
        team: Team,
    ) -> Self | None:
        """Return the shared device; None where trainer and servers have devices of their own."""
        if not config.inference.colocated or isinstance(publisher, PolicyFiles):
            return None
        return cls(store, publisher, team)

    async def take(self) -> None:
        """Put the servers to sleep and bring the trainer's state to the device.

        Raises:
            StoreError: the store could not be told.
        """
        await self._store.trainer_leases.set_has_device(True)
        await self._publisher.put_to_sleep()
        await self._team.move(to_device=True)

    async def leave(self) -> None:
        """Take the trainer's state to host memory, so that there is room to wake the servers."""
        await self._team.move(to_device=False)

    async def hand_back(self) -> None:
        """Say that servers may be started and woken by their keepers again.

        Raises:
            StoreError: the store could not be told.
        """
        await self._store.trainer_leases.set_has_device(False)

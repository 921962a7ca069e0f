"""Keeps the leases of all slots of a process alive with one write per interval."""

import asyncio
import logging

from agentrl.errors import StoreError
from agentrl.rollout.worker.attempt import Slot
from agentrl.store import TrajectoryStore

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Heartbeats for every held slot; a slot whose lease is gone is cancelled.

    Args:
        store: the trajectory store.
        lease_seconds: how long a heartbeat holds; three are sent in that time.
    """

    def __init__(self, store: TrajectoryStore, lease_seconds: float) -> None:
        self._store = store
        self._lease_seconds = lease_seconds
        self._slots: dict[str, Slot] = {}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots held now."""
        return tuple(self._slots.values())

    def hold(self, slot: Slot) -> None:
        """Keep this slot's lease alive."""
        self._slots[slot.record.id] = slot

    def let_go(self, slot: Slot) -> None:
        """Stop doing so."""
        if self._slots.get(slot.record.id) is slot:
            del self._slots[slot.record.id]

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        interval = self._lease_seconds / 3
        while True:
            await asyncio.sleep(interval)
            try:
                await self.beat()
            except StoreError as error:
                # Fencing keeps a late holder harmless, so the rollouts go on meanwhile.
                log.warning("heartbeat failed, trying again: %s", error)

    async def beat(self) -> None:
        """Renew all leases at once, and cancel the slots that no longer have one."""
        held = {slot.record.id: slot for slot in self.slots}
        if not held:
            return
        leases = [slot.lease for slot in held.values()]
        for record_id in await self._store.records.renew(leases, self._lease_seconds):
            # A slot that ended while the heartbeat was under way has nothing left to lose.
            slot = held[record_id]
            if self._slots.get(record_id) is slot:
                log.warning("%s: lease lost, its rollout is stopped", record_id)
                slot.cancel("lease_lost")

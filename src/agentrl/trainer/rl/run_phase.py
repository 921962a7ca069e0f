"""Writes the trainer's current phase to the run's document, for users to see."""

import asyncio
import logging

from agentrl.errors import StoreError
from agentrl.schema import RunPhase
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)


class PhaseReporter:
    """Writes the phases of a run without blocking the trainer; very short ones may be skipped."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._phase: RunPhase = "loading"
        self._is_new = asyncio.Event()

    def enter(self, phase: RunPhase) -> None:
        """Set the phase that the trainer enters."""
        self._phase = phase
        self._is_new.set()

    async def report(self) -> None:
        """Write every phase that is entered, until cancelled."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            try:
                await self._store.runs.set_phase(self._phase)
            except StoreError as error:
                logger.warning("cannot record that the run is %s: %s", self._phase, error)

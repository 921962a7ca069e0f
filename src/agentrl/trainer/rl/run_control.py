"""Follows the controls of a run, which users may edit in its document at any time."""

import asyncio
import logging

from agentrl.errors import StoreError
from agentrl.schema import Control
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.step_groups import GroupReader

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 1.0


class RunControl:
    """Size and freshness of the steps."""

    def __init__(self, store: TrajectoryStore, reader: GroupReader, control: Control) -> None:
        """Start with the flags' controls.

        Args:
            store: the run's store.
            reader: is told of changes, which may admit further samples.
            control: of the flags.
        """
        self._store = store
        self._reader = reader
        self.current = control

    async def read(self) -> Control:
        """Read the controls from the run's document."""
        run = await self._store.runs.get()
        if run is not None:
            self.current = run.control
            self._reader.lost_versions = run.lost_versions
        return self.current

    async def follow(self) -> None:
        """Apply edits of the controls until cancelled, including during a step."""
        while True:
            await asyncio.sleep(_CONTROL_SECONDS)
            try:
                if await self._store.runs.audit_control():
                    logger.info("the run's controls were edited in the database")
                await self._reader.apply_control(await self.read())
            except StoreError as error:
                logger.warning(
                    "cannot read the run's controls, keeping the current ones: %s", error
                )

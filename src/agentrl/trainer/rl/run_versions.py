"""The versions of a run's weights: written, kept in checkpoints, and delivered to the servers.

Input: the learners after an optimizer step. Output: a version's files, a checkpoint with the ledger's
commit, servers that serve the version. With `--colocated`, also who has the devices.
"""

import logging

from agentrl.config.sections import RootConfig
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.trainer.checkpoint import CheckpointSaver
from agentrl.trainer.rl.colocation import SharedDevice
from agentrl.trainer.rl.run_start import OpenedRun, publisher_of
from agentrl.trainer.training_session import TrainingSession

logger = logging.getLogger(__name__)

Seconds = dict[str, float]
"""Wall time of a step by phase."""


class RunVersions:
    """Writes, keeps and delivers the weights of the newest version."""

    def __init__(self, session: TrainingSession, config: RootConfig, run: OpenedRun) -> None:
        """Start after the newest checkpoint."""
        self._store = run.store
        self._group = session.group
        self._history = session.history
        self._publisher = publisher_of(run.store, config, session.group)
        self._device: SharedDevice | None = None
        if config.inference.colocated and isinstance(self._publisher, PolicyPublisher):
            self._device = SharedDevice(run.store, self._publisher, session.group)
        self._has_device = False
        self._saver = CheckpointSaver(
            session.output_path,
            group=session.group,
            trainer=config.trainer,
            saved_step=session.history.last_step,
            on_saved=lambda step: run.store.ledger.commit(config.trainer.consumer, step),
        )
        self._written: int | None = None
        """Version whose files are complete."""
        self._announced: int | None = None

    async def publish_first(self, *, leads: bool) -> None:
        """Write and deliver the weights that the run starts from."""
        step = self._history.last_step
        lost = await self._store.runs.note_lost_versions(step) if leads else None
        if lost is not None:
            logger.warning(
                "the run resumes after step %d, and checkpoints of later steps are lost: versions "
                "%d to %d get new weights; records of the lost ones count as steps away from "
                "version %d, and those beyond --max_staleness are dropped",
                *(step, step + 1, lost.last, step),
            )
        await self._write(step, None)
        await self.publish()
        if leads:
            await self._store.runs.end_lost_versions()

    async def acquire_device(self, seconds: Seconds) -> None:
        """Take the devices of colocated servers, unless this trainer has them."""
        if self._device is not None and not self._has_device:
            with self._history.timed("acquire_device", seconds):
                await self._device.acquire()
            self._has_device = True

    async def commit(self, seconds: Seconds | None = None) -> None:
        """Save a checkpoint of the newest version; its records then count as trained.

        Before the announcement where possible: a crash in between must not take back a version
        that servers already serve.
        """
        step = self._history.last_step
        await self._write(step, seconds)
        with self._history.timed("checkpoint", seconds):
            await self._saver.save(self._publisher.directory(step), self._history)

    async def publish(self, seconds: Seconds | None = None) -> None:
        """Deliver the newest version to the servers; sleeping ones of a colocated run wake with it."""
        step = self._history.last_step
        if self._publisher.needs_files:
            await self._write(step, seconds)
        if self._device is not None and self._has_device:
            with self._history.timed("offload_device", seconds):
                await self._device.offload()
        with self._history.timed("publish", seconds):
            is_written = self._written == step
            report = await self._publisher.announce(
                step, None if is_written else self._group.export
            )
            self._announced = step
            if self._device is not None:
                await self._device.release()
                self._has_device = False
        logger.info(
            "version %d published: %d server(s) updated, %d failed",
            report.version,
            len(report.updated),
            len(report.failed),
        )

    async def finish(self) -> None:
        """Wait for what is written in the background, and save the last checkpoint if it is missing."""
        with self._history.timed("checkpoint"):
            await self._saver.settle()
            await self._publisher.settle()
            step = self._history.last_step
            if self._saver.saved_step < step:
                await self._saver.save(self._publisher.directory(step), self._history)
                await self._saver.settle()

    async def cancel(self) -> None:
        """Cancel the checkpoint in progress, if any."""
        await self._saver.cancel()

    async def _write(self, step: int, seconds: Seconds | None) -> None:
        if self._written == step:
            return
        with self._history.timed("publish", seconds):
            if self._announced == step:
                await self._publisher.settle()  # it writes what it announced
            else:
                await self._group.export(self._publisher.directory(step))
        self._written = step

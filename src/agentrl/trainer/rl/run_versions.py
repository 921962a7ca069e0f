"""The versions of a run's weights: written, kept in checkpoints, and delivered to the servers.

Input: the learners after an optimizer step. Output: a version's files, a checkpoint with the ledger's
commit, servers that serve the version.

Trainer ranks and servers divide their devices (`--share_gpus`), or have them in turn (`--colocated`):

    servers   sample ─────────┐ asleep                        ┌ sample ───
    trainer   in host memory  └ step, weights and checkpoint ─┘ in host memory

The trainer takes all of them when the batch of its step is ready, and gives them back once the new
version is published. If it dies in between, the supervisors wake their servers after its lease
expires.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from agentrl.config.sections import RootConfig
from agentrl.config.shared_gpus import note_shortage, trainer_fraction
from agentrl.errors import TrainingError
from agentrl.inference.weight_sync import AdapterNames, PolicyPublisher
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery
from agentrl.inference.weight_sync.delivery import Delivery
from agentrl.inference.weight_sync.ipc_delivery import IpcDelivery
from agentrl.schema.lost_versions import LostVersions, version_of
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup
from agentrl.trainer.checkpoint import CheckpointSaver
from agentrl.trainer.rl.run_start import OpenedRun, TrainingSession

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
        self._publisher = _publisher_of(run.store, config, session.group)
        self._takes_turns = config.inference.colocated
        self._has_device = not self._takes_turns
        self._saver = CheckpointSaver(
            session.output_path,
            group=session.group,
            trainer=config.trainer,
            saved_step=session.history.last_step,
            on_saved=lambda step: run.store.ledger.commit(config.trainer.consumer, step),
        )
        self._lost: Sequence[LostVersions] = ()
        self._written: int | None = None
        """Step whose files are complete."""
        self._announced: int | None = None

    def number(self, step: int) -> int:
        """Return the version of the weights after a step."""
        return version_of(step, self._lost)

    async def publish_first(self, *, leads: bool) -> None:
        """Write and deliver the weights that the run starts from."""
        step = self._history.last_step
        lost = await self._store.runs.note_lost_versions(step) if leads else None
        if lost is not None:
            logger.warning(
                "the run resumes after step %d, whose version is %d: the weights of versions %d to %d are "
                "lost, and the next version is %d; records of the lost ones count as steps away from "
                "version %d, and those beyond --max_staleness are dropped",
                *(step, lost.after, lost.after + 1, lost.last, lost.last + 1, lost.after),
            )
        if leads and (run := await self._store.runs.get()) is not None:
            self._lost = run.lost_versions
        await self._write(step, None)
        await self.publish()

    async def acquire_device(self, seconds: Seconds) -> None:
        """Take the devices of colocated servers, unless this trainer has them."""
        if self._has_device:
            return
        with self._history.timed("acquire_device", seconds):
            # Recorded first: otherwise, a supervisor could start a server while the others go to sleep.
            await self._store.trainer_leases.set_has_device(True)
            await self._publisher.put_to_sleep()
            await self._group.move(to_device=True)
        self._has_device = True

    async def commit(self, seconds: Seconds | None = None) -> None:
        """Save a checkpoint of the newest version; its records then count as trained.

        Before the announcement where possible: a crash in between must not take back a version
        that servers already serve.
        """
        step = self._history.last_step
        await self._write(step, seconds)
        with self._history.timed("checkpoint", seconds):
            await self._saver.save(self._directory(step), self._history)

    async def publish(self, seconds: Seconds | None = None) -> None:
        """Deliver the newest version to the servers; sleeping ones of a colocated run wake with it."""
        step = self._history.last_step
        if self._publisher.needs_files:
            await self._write(step, seconds)
        if self._takes_turns and self._has_device:
            with self._history.timed("offload_device", seconds):
                await self._group.move(to_device=False)
        with self._history.timed("publish", seconds):
            is_written = self._written == step
            report = await self._publisher.announce(
                self.number(step), None if is_written else self._group.export
            )
            self._announced = step
            if (
                self._takes_turns
            ):  # the announcement woke the servers; supervisors may start them, too
                await self._store.trainer_leases.set_has_device(False)
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
                await self._saver.save(self._directory(step), self._history)
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
                await self._group.export(self._directory(step))
        self._written = step

    def _directory(self, step: int) -> Path:
        return self._publisher.directory(self.number(step))


def _publisher_of(
    store: TrajectoryStore, config: RootConfig, group: WorkerGroup
) -> PolicyPublisher:
    """Return what publishes the weights: to the servers, or for a further consumer to files only."""
    delivery: Delivery | None = None
    if config.publish.weight_sync == "ipc":
        delivery = IpcDelivery(config.publish, group.send_weights)
    elif config.publish.weight_sync == "distributed":
        # The embedded engine has no GPU.
        on_gpus = torch.cuda.is_available() and config.inference.inference_backend == "sglang"
        delivery = BroadcastDelivery(
            config.publish, group.send_weights, "nccl" if on_gpus else "gloo"
        )
    return PolicyPublisher(
        store,
        config.run.output_path / "policy",
        publish=config.publish,
        inference=config.inference,
        adapters=AdapterNames(config.run.run_name) if config.model.lora_rank else None,
        delivery=delivery,
        serves=config.trainer.consumer == DEFAULT_CONSUMER,
    )


@contextmanager
def beside_servers(config: RootConfig) -> Iterator[None]:
    """Keep to the trainer's part of GPUs that servers share, and explain if it does not suffice.

    Without this limit, it would be the server that finds no memory.
    """
    inference = config.inference
    if not inference.share_gpus:
        yield
        return
    if torch.cuda.is_available():
        fraction = trainer_fraction(inference.inf_mem_ratio)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_per_process_memory_fraction(fraction, rank)
    try:
        yield
    except torch.OutOfMemoryError as error:
        # What follows describes the state of torch's allocator.
        reason = ". ".join(str(error).split(". ")[:2])
        note_shortage(config.run.output_path, reason)
        raise TrainingError(
            f"out of GPU memory beside the server (--share_gpus): {reason}; start again with "
            "--colocated, which a run on one GPU does by itself, or lower --max_tokens or "
            f"--inf_mem_ratio ({inference.inf_mem_ratio:g})"
        ) from error

"""Devices of trainer ranks and inference servers: divided (`--share_gpus`), or in turn (`--colocated`).

    servers   sample ─────────┐ asleep                        ┌ sample ───
    trainer   in host memory  └ step, weights and checkpoint ─┘ in host memory

The trainer acquires all of them when the batch of its step is ready, and releases them once the new
version is published. If it dies in between, the supervisors wake their servers after its lease
expires.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.config.sections import RootConfig
from agentrl.config.shared_gpus import note_shortage, trainer_fraction
from agentrl.errors import TrainingError
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.store import TrajectoryStore
from agentrl.trainer.bootstrap import WorkerGroup


class SharedDevice:
    """The shared device from the training loop's point of view."""

    def __init__(
        self, store: TrajectoryStore, publisher: PolicyPublisher, group: WorkerGroup
    ) -> None:
        """Start with the device held by the servers.

        Args:
            store: tells the supervisors whether the trainer has the device.
            publisher: puts servers to sleep; its `announce` wakes them.
            group: the ranks, whose state starts in host memory.
        """
        self._store = store
        self._publisher = publisher
        self._group = group

    async def acquire(self) -> None:
        """Put the servers to sleep and bring the trainer's state to the device."""
        # Recorded first: otherwise, a supervisor could start a server while the others go to sleep.
        await self._store.trainer_leases.set_has_device(True)
        await self._publisher.put_to_sleep()
        await self._group.move(to_device=True)

    async def offload(self) -> None:
        """Move the trainer's state to host memory, to free the device for the servers."""
        await self._group.move(to_device=False)

    async def release(self) -> None:
        """Allow the supervisors to start and wake servers again."""
        await self._store.trainer_leases.set_has_device(False)


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

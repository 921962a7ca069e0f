"""The trainer's ranks: who they are, and how values travel between them.

Nothing but the environment that `torchrun` and `accelerate launch` set (`RANK`, `WORLD_SIZE`,
`LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) is used. One process alone has no process group.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from agentrl.distributed.mesh import MeshShape

T = TypeVar("T")

# Ranks other than 0 sit in a broadcast while rank 0 waits for samples, which has no upper bound.
# A rank that died is noticed at once, because its connection closes.
_GROUP_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer's processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    shape: MeshShape = field(default_factory=MeshShape)
    """How the ranks share the work."""

    @property
    def speaks(self) -> bool:
        """Whether this is the rank of its share of the work whose sums and facts count."""
        return self.shape.speaks(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that talks to the store and the servers."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    def enter_thread(self) -> None:
        """Make this rank's device the current one of the calling thread."""
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's `value` on every rank (collective)."""
        if self.world_size == 1:
            assert value is not None
            return value
        box: list[T | None] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        received = box[0]
        assert received is not None
        return received

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return the element of rank 0's `values` that is meant for this rank (collective).

        Args:
            values: one element a share of the work; None on ranks other than 0.
        """
        if self.world_size == 1:
            assert values is not None
            assert len(values) == 1
            return values[0]
        box: list[T | None] = [None]
        each = None
        if values is not None:
            each = [values[self.shape.share_of(rank)] for rank in range(self.world_size)]
        dist.scatter_object_list(box, each, src=0)
        received = box[0]
        assert received is not None
        return received

    def gather_shares(self, value: T) -> list[T]:
        """Return the `value` of every share of the work on rank 0, nothing elsewhere (collective)."""
        if self.world_size == 1:
            return [value]
        box: list[T | None] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value if self.speaks else None, box, dst=0)
        return [received for received in box or () if received is not None]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum of `values` over all shares of the work (collective)."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        if not self.speaks:
            total.zero_()
        dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def barrier(self) -> None:
        """Wait until every rank is here (collective)."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def joined_ranks(shape: Callable[[int], MeshShape] = MeshShape.of) -> Iterator[Ranks]:
    """Join the other ranks that the environment speaks of, and leave them at the end.

    Args:
        shape: how so many ranks share the work.

    Raises:
        ConfigError: `shape` has no use for that many ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    mesh_shape = shape(world_size)
    if world_size == 1:
        yield Ranks()
        return
    ranks = Ranks(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        shape=mesh_shape,
    )
    ranks.enter_thread()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
    dist.init_process_group(backend, timeout=_GROUP_TIMEOUT)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()

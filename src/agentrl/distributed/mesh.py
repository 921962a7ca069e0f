"""The trainer's ranks and their device mesh: the division of work, and collectives on objects.

Dimensions, outermost first: `pp` (the layers, as stages of a pipeline), `dp_replicate` (copies of the
sharded model, HSDP), `dp_shard` (FSDP2), `cp` (the tokens of a row), `ep` (the experts of a
mixture-of-experts model), `tp` (the heads, the hidden units and the vocabulary). The innermost ones
communicate most, so they lie on one machine.

Ranks along `dp_replicate`, `dp_shard` and `ep` are data parallel: each computes its own share of a
step's micro-batches. Ranks along `pp`, `cp` and `tp` compute one share together.

Input: the environment variables that `torchrun` and `accelerate launch` set (`RANK`, `WORLD_SIZE`,
`LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), and the sizes. A single process has no
process group.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import ConfigError

MESH_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh's dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        dp_replicate: int = 1,
        cp: int = 1,
        ep: int = 1,
        tp: int = 1,
        pp: int = 1,
    ) -> Self:
        """Return the shape with these sizes whose `dp_shard` uses all remaining ranks."""
        divisor = dp_replicate * cp * ep * tp * pp
        if world_size % divisor:
            raise ConfigError(
                f"{world_size} trainer rank(s) do not fill a mesh of --pp_size {pp} x "
                f"dp_replicate_size {dp_replicate} x --cp_size {cp} x --ep_size {ep} x --tp_size "
                f"{tp}; start a multiple of {divisor} (--num_processes), or choose smaller sizes"
            )
        return cls(dp_replicate, world_size // divisor, cp, ep, tp, pp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_DIMENSIONS`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.ep, self.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shares of a step: `dp_replicate * dp_shard * ep`."""
        return self.dp_replicate * self.dp_shard * self.ep

    def dp_rank_of(self, rank: int) -> int:
        """Return the index of the data-parallel share that a rank works on."""
        outer, inner = divmod(rank % (self.world_size // self.pp), self.cp * self.ep * self.tp)
        return outer * self.ep + inner // self.tp % self.ep

    def is_dp_leader(self, rank: int) -> bool:
        """Return whether a rank reports for its share: the first along `cp` and `tp`.

        Of the stages of a pipeline it is the last, which computes the loss.
        """
        inner = rank % (self.cp * self.ep * self.tp)
        is_last_stage = rank >= self.world_size - self.world_size // self.pp
        return is_last_stage and inner // (self.ep * self.tp) == 0 and inner % self.tp == 0

    def build(self, device: torch.device) -> DeviceMesh:
        """Return the mesh (collective over all ranks).

        Four groups are flattened from its dimensions: `fsdp` (`dp_shard`, `cp`, `ep`: shards the
        parameters that are not an expert's), `experts` (`ep`, `tp`: each rank holds some of the
        experts), `expert_fsdp` (`dp_shard`, `cp`: the ranks that hold the same experts) and `row`
        (`cp`, `tp`: the ranks that share a row).
        """
        mesh = init_device_mesh(device.type, self.sizes, mesh_dim_names=MESH_DIMENSIONS)
        mesh["dp_shard", "cp", "ep"]._flatten("fsdp")
        mesh["ep", "tp"]._flatten("experts")
        mesh["dp_shard", "cp"]._flatten("expert_fsdp")
        mesh["cp", "tp"]._flatten("row")
        return mesh


T = TypeVar("T")

# While rank 0 waits for samples, without a time limit, the other ranks block in a broadcast. The
# death of a rank is noticed without a timeout, because its connections close at once.
_GROUP_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the trainer's ranks, and collectives on objects (over gloo)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    shape: MeshShape = field(default_factory=MeshShape)
    """How the work is divided among the ranks."""

    @property
    def is_dp_leader(self) -> bool:
        """Whether this rank reports for its data-parallel share."""
        return self.shape.is_dp_leader(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which talks to the store and the servers."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    def build_mesh(self) -> DeviceMesh | None:
        """Return the mesh of all ranks, or None for a single process (collective)."""
        return None if self.world_size == 1 else self.shape.build(self.device)

    def new_group(self) -> dist.ProcessGroup | None:
        """Return another group of all ranks on host memory; None for a single process (collective)."""
        return None if self.world_size == 1 else dist.new_group(backend="gloo")

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
        """Return the element of rank 0's `values` for this rank's share (collective).

        Args:
            values: one element for each data-parallel share; None on ranks other than 0.
        """
        if self.world_size == 1:
            assert values is not None
            assert len(values) == 1
            return values[0]
        box: list[T | None] = [None]
        elements = None
        if values is not None:
            elements = [values[self.shape.dp_rank_of(rank)] for rank in range(self.world_size)]
        dist.scatter_object_list(box, elements, src=0)
        received = box[0]
        assert received is not None
        return received

    def gather_dp(self, value: T) -> list[T]:
        """Return every share's `value` on rank 0, in order, and [] elsewhere (collective)."""
        if self.world_size == 1:
            return [value]
        box: list[T | None] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value if self.is_dp_leader else None, box, dst=0)
        return [received for received in box or () if received is not None]

    def gather_all(self, value: T) -> list[T]:
        """Return every rank's `value`, in order of the ranks, on all of them (collective)."""
        if self.world_size == 1:
            return [value]
        box: list[T | None] = [None] * self.world_size
        dist.all_gather_object(box, value)
        return cast(list[T], box)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise float64 sum of `values` over all shares (collective)."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        if not self.is_dp_leader:
            total.zero_()
        dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def barrier(self) -> None:
        """Wait until every rank has called this method (collective)."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def joined_ranks(shape: Callable[[int], MeshShape] = MeshShape.of) -> Iterator[Ranks]:
    """Join the process group that the environment describes, and leave it at the end.

    Args:
        shape: returns the mesh for a number of ranks.
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
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    dist.init_process_group(
        backend,
        store=_private_store(world_size) if is_one_machine else None,
        rank=ranks.rank,
        world_size=world_size,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _private_store(world_size: int) -> Any:
    """Return a store in a file of this user, through which the ranks of one machine find each other.

    A TCP store serves everybody who reaches its port. Whoever writes another rank's address there
    takes its place, and ranks unpickle what they receive from each other.
    """
    folder = Path(tempfile.gettempdir(), f"agentrl-ranks-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not yours; set TMPDIR to a folder of yours")
    # What the launcher started last, and no file that ranks left when they were killed.
    launcher = psutil.Process(os.getppid())
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{launcher.pid}-{launcher.create_time()}-{restart}"
    return dist.FileStore(str(folder / name), world_size)  # type: ignore[attr-defined]

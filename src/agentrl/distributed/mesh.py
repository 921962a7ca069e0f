"""The trainer's one device mesh: which ranks share what.

Dimensions, outermost first: `dp_replicate` (copies of the sharded model, HSDP), `dp_shard` (FSDP2),
`cp` (the tokens of a row), `ep` (the experts of a mixture-of-experts model), `tp` (the heads, the
hidden units and the vocabulary). The innermost ones talk most, so they lie on one machine.

Ranks along `dp_replicate`, `dp_shard` and `ep` compute different micro-batches: a *share* of the
step each. Ranks along `cp` and `tp` compute one share together.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import ConfigError

MESH_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "ep", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh's dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @classmethod
    def of(
        cls, world_size: int, *, dp_replicate: int = 1, cp: int = 1, ep: int = 1, tp: int = 1
    ) -> Self:
        """Give `dp_shard` all ranks that the other dimensions leave.

        Raises:
            ConfigError: the number of ranks is no multiple of what the others take.
        """
        taken = dp_replicate * cp * ep * tp
        if world_size % taken:
            raise ConfigError(
                f"{world_size} trainer rank(s) do not fill a mesh of --dp_replicate_size "
                f"{dp_replicate} x --cp_size {cp} x --ep_size {ep} x --tp_size {tp}; start a "
                f"multiple of {taken} (--num_processes), or choose smaller sizes"
            )
        return cls(dp_replicate, world_size // taken, cp, ep, tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_DIMENSIONS`."""
        return (self.dp_replicate, self.dp_shard, self.cp, self.ep, self.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_shares * self.cp * self.tp

    @property
    def num_shares(self) -> int:
        """Number of shares into which a step's work is divided."""
        return self.dp_replicate * self.dp_shard * self.ep

    def share_of(self, rank: int) -> int:
        """Return which share a rank computes (alone or with others)."""
        outer, inner = divmod(rank, self.cp * self.ep * self.tp)
        return outer * self.ep + inner // self.tp % self.ep

    def speaks(self, rank: int) -> bool:
        """Return whether a rank is the one of its share whose sums and facts count."""
        inner = rank % (self.cp * self.ep * self.tp)
        return inner // (self.ep * self.tp) == 0 and inner % self.tp == 0

    def build(self, device: torch.device) -> DeviceMesh:
        """Return the mesh (collective over all ranks).

        Besides its dimensions it has the names `fsdp` (all ranks over which a parameter that is
        not an expert's is sharded, before `tp`), `experts` (`ep` and `tp`: the ranks over which the
        experts are dealt out) and `expert_fsdp` (the ranks that hold the same experts).
        """
        mesh = init_device_mesh(device.type, self.sizes, mesh_dim_names=MESH_DIMENSIONS)
        mesh["dp_shard", "cp", "ep"]._flatten("fsdp")
        mesh["ep", "tp"]._flatten("experts")
        mesh["dp_shard", "cp"]._flatten("expert_fsdp")
        return mesh

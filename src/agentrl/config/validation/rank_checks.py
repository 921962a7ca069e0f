"""Checks of the trainer's ranks: their number, and whether they form a mesh.

Only commands that start ranks run these checks: other commands see the same flags and environment.
"""

import os
from typing import NamedTuple, Self

from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError

_MAX_RANKS = 1024


class MeshSizes(NamedTuple):
    """The flags of the mesh dimensions that split a model."""

    tp: int
    ep: int
    cp: int
    pp: int

    @classmethod
    def of(cls, trainer: TrainerSection) -> Self:
        """Return the sizes that the flags give."""
        return cls(tp=trainer.tp_size, ep=trainer.ep_size, cp=trainer.cp_size, pp=trainer.pp_size)


def check_ranks(trainer: TrainerSection) -> None:
    """Refuse more ranks than a machine starts, and those that do not form a mesh.

    Raises:
        ConfigError: the flags contradict each other, or the environment asks for several machines.
    """
    if os.environ.get("NUM_MACHINES", "1") not in ("", "1"):
        raise ConfigError(
            "NUM_MACHINES: `agentrl run` starts one machine; start the trainer's ranks on each machine "
            "with torchrun (docs/deploy.md), or unset it"
        )
    if trainer.num_processes > _MAX_RANKS:
        raise ConfigError(
            f"--num_processes {trainer.num_processes}: a machine starts at most {_MAX_RANKS} ranks; "
            "give one per GPU"
        )
    check_mesh(trainer, trainer.num_processes)


def check_mesh(trainer: TrainerSection, num_ranks: int) -> None:
    """Refuse ranks that do not form the requested mesh, or are too few for it.

    Raises:
        ConfigError: names the flags.
    """
    if trainer.cpu_offload and num_ranks == 1:
        raise ConfigError(
            "--cpu_offload requires FSDP2, which needs several ranks; start more "
            "(--num_processes), or save memory with --gradient_checkpointing true"
        )
    mesh_size = trainer.dp_replicate_size * trainer.cp_size * trainer.ep_size * trainer.tp_size
    mesh_size *= trainer.pp_size
    if num_ranks % mesh_size:
        raise ConfigError(
            f"{num_ranks} trainer rank(s) do not match a mesh of --pp_size {trainer.pp_size} x "
            f"dp_replicate_size {trainer.dp_replicate_size} x --cp_size {trainer.cp_size} x "
            f"--ep_size {trainer.ep_size} x --tp_size {trainer.tp_size}; start a multiple of "
            f"{mesh_size} (--num_processes), or choose smaller sizes"
        )

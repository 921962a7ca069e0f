"""Checks of the trainer's ranks: their number, their machines, and whether they form a mesh.

Only commands that start ranks run these checks: other commands see the same flags and environment.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.errors import ConfigError

_MAX_RANKS_OF_MACHINE = 1024


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


def check_machines(config: RootConfig) -> None:
    """Refuse flags with which machines cannot form one run, or ranks cannot form a mesh.

    Raises:
        ConfigError: the flags contradict each other, or one is missing.
    """
    for problem in _machine_contradictions(config):
        raise ConfigError(problem)
    trainer = config.trainer
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
            f"--dp_replicate_size {trainer.dp_replicate_size} x --cp_size {trainer.cp_size} x "
            f"--ep_size {trainer.ep_size} x --tp_size {trainer.tp_size}; start a multiple of "
            f"{mesh_size} (--num_processes), or choose smaller sizes"
        )


def _machine_contradictions(config: RootConfig) -> Iterator[str]:
    trainer = config.trainer
    machines = trainer.num_machines
    if trainer.num_processes > _MAX_RANKS_OF_MACHINE * machines:
        yield (
            f"--num_processes {trainer.num_processes}: a machine starts at most "
            f"{_MAX_RANKS_OF_MACHINE} ranks; give one per GPU"
        )
    if trainer.machine_rank >= machines:
        yield (
            f"--machine_rank {trainer.machine_rank}: machines are numbered from 0, and "
            f"--num_machines is {machines}"
        )
    if machines == 1:
        return
    if trainer.num_processes % machines:
        yield (
            f"--num_processes {trainer.num_processes} is the number of ranks on all machines; use "
            f"a multiple of --num_machines {machines}"
        )
    if trainer.main_process_ip is None:
        yield (
            f"--num_machines {machines} needs --main_process_ip (or MASTER_ADDR): the address of "
            "machine 0"
        )
    if config.store.db_connection_string is None:
        yield (
            f"--num_machines {machines} needs --db_connection_string (or MONGODB_URI): the private "
            "mongod serves only one machine"
        )

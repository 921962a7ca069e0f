"""Changes of flags that make a trainer rank fit, each rehearsed before it is offered."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentrl.config.sections import RootConfig, TrainerSection
from agentrl.errors import ConfigError
from agentrl.plugins.planner.rehearsals import RankMemory, Rehearsals

_MAX_REMEDIES = 2
"""Limit on offered remedies, because each costs a rehearsal of some seconds."""
_MAX_REHEARSALS = 4
_SHORT_ROW, _SHORT_CHUNK = 4096, 1024
_ADAPTER_RANK = 16


@dataclass(frozen=True)
class Remedy:
    """Flags, and the memory of a rank with them."""

    flags: str
    peak: int


def remedies(
    rehearsals: Rehearsals, config: RootConfig, rank: RankMemory, device_bytes: int
) -> tuple[Remedy, ...]:
    """Return changes with which a rank fits, those with the lowest cost first.

    Args:
        rehearsals: an open process.
        config: the configuration that does not fit.
        rank: the memory that it needs.
        device_bytes: the memory available to a rank.
    """
    found: list[Remedy] = []
    for section, changes in islice(_changes(config, rank, device_bytes), _MAX_REHEARSALS):
        changed = getattr(config, section).model_copy(update=changes)
        try:
            peak = rehearsals.rank(config.model_copy(update={section: changed})).peak
        except ConfigError:
            continue  # the model or the mesh does not allow it
        if peak <= device_bytes:
            flags = (f"--{name} {_flag_value(value)}" for name, value in changes.items())
            found.append(Remedy(" ".join(flags), peak))
        if len(found) == _MAX_REMEDIES:
            break
    return tuple(found)


def _changes(
    config: RootConfig, rank: RankMemory, device_bytes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    trainer = config.trainer
    state_bytes = rank.weights + rank.gradients + rank.optimizer
    if state_bytes <= device_bytes:
        yield from (("trainer", changes) for changes in _smaller_passes(trainer))
    num_ranks = trainer.num_processes
    for factor in (2, 4, 8):
        if state_bytes // factor <= device_bytes:
            yield "trainer", {"num_processes": num_ranks * factor}
    if num_ranks > 1 and not trainer.cpu_offload:
        yield "trainer", {"cpu_offload": True}
    if not config.model.lora_rank:
        yield "model", {"lora_rank": _ADAPTER_RANK}


def _smaller_passes(trainer: TrainerSection) -> Iterator[dict[str, Any]]:
    """Yield cumulative changes, in increasing order of cost."""
    changes: dict[str, Any] = {}
    if trainer.loss_seq_chunk_size > _SHORT_CHUNK:
        changes["loss_seq_chunk_size"] = _SHORT_CHUNK
        yield dict(changes)
    if not trainer.gradient_checkpointing:
        changes["gradient_checkpointing"] = True
        yield dict(changes)
    if trainer.max_tokens > _SHORT_ROW:
        changes["max_tokens"] = max(_SHORT_ROW, trainer.max_tokens // 4)
        yield dict(changes)
    if not trainer.activation_offloading:
        changes["activation_offloading"] = True
        yield dict(changes)


def _flag_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

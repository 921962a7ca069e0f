"""Whether trainer and servers fit on the same GPUs, and what a start on a single GPU does.

    one GPU, SGLang, neither flag ──fits──> --share_gpus    both keep their memory
                                  ──else──> --colocated     turns
                                  ──else──> the error of too few GPUs

Input: a checked configuration, the memory of a GPU, and the demand that a plugin has measured.
Output: a configuration with the servers' part of the memory, and a line that says why. Where a trainer
ran out of memory beside the servers, its output folder says so, and the next start takes turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.rules import broken_rules
from agentrl.config.sections import RootConfig
from agentrl.config.shared_gpus import SERVER_RESERVE, shortage_of
from agentrl.config.validation.placement_checks import (
    gpus_per_server,
    ipc_contradictions,
)
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.gpu_placement import placed
from agentrl.plugin_registry import hooks, imported
from agentrl.runtime.gpus import smallest_gpu_bytes, visible_gpus

_UNKNOWN = (
    "the memory of a GPU, or what trainer and servers need of it, is unknown; give --gpu_memory_gb "
    "where nvidia-smi is not available, or --inf_mem_ratio"
)
_GB = 10**9
_ALLOCATOR_SHARE = 1.22
"""What torch's allocator takes of a GPU, as a multiple of the tensors' peak (docs/sizing.md)."""
_TRAINER_RESERVE_BYTES = 1 * _GB
"""Memory of the trainer outside torch's allocator: CUDA context and libraries."""


@dataclass(frozen=True)
class GpuDemand:
    """Bytes that trainer and server need on a GPU that they share."""

    trainer_peak: int
    """Peak of the rehearsed step of a rank."""
    server_weights: int
    """Weights on one GPU of a server."""
    conversation: int
    """Cache of the longest conversation: a server with less can answer nothing."""


MeasureDemand = Callable[[RootConfig, Path], GpuDemand]
"""Measures the demand of a configuration with the model of a directory. Raises `ConfigError` if it
cannot."""


@dataclass(frozen=True)
class SharedMemory:
    """A GPU's memory, divided between trainer and server."""

    gpu_bytes: int
    demand: GpuDemand

    @property
    def trainer_bytes(self) -> int:
        """Memory that the trainer takes: its peak, and what its allocator and CUDA add."""
        return int(self.demand.trainer_peak * _ALLOCATOR_SHARE) + _TRAINER_RESERVE_BYTES

    @property
    def server_ratio(self) -> float:
        """Fraction that remains for the server's weights and cache; negative if none does."""
        left = self.gpu_bytes * (1 - SERVER_RESERVE) - self.trainer_bytes
        return int(left / self.gpu_bytes * 1000) / 1000

    def problem(self, ratio: float) -> str | None:
        """Return why a fraction for the server does not fit, None if it does."""
        demand, gpu = self.demand, self.gpu_bytes
        needed = demand.server_weights + demand.conversation
        parts = (
            f"the trainer needs {_gb(self.trainer_bytes)} (rehearsed peak {_gb(demand.trainer_peak)}), "
            f"a server {_gb(needed)} (weights {_gb(demand.server_weights)}, cache of the longest "
            f"conversation {_gb(demand.conversation)}) and {_gb(gpu * SERVER_RESERVE)} for its passes"
        )
        if needed > gpu * self.server_ratio:
            return f"{parts}, and a GPU has {_gb(gpu)}"
        if needed > gpu * ratio:
            return f"{parts}, and --inf_mem_ratio {ratio:g} leaves it {_gb(gpu * ratio)}"
        if ratio > self.server_ratio:
            return f"{parts}; --inf_mem_ratio can be {self.server_ratio:g} at most"
        return None

    def line(self, ratio: float) -> str:
        """Return the division in one line."""
        cache = int(self.gpu_bytes * ratio) - self.demand.server_weights
        return (
            f"trainer {_gb(self.trainer_bytes)} and server {_gb(self.gpu_bytes * ratio)} "
            f"(cache {_gb(cache)}) fit in the {_gb(self.gpu_bytes)} of a GPU"
        )


def sharing_by_default(config: RootConfig) -> RootConfig:
    """Return the configuration with `--share_gpus`, if neither it nor `--colocated` was given.

    Only with one GPU for one trainer rank and one SGLang server (the embedded engine stays on the CPU unless
    a flag names a GPU for it); `settled` may still decide otherwise.
    """
    inference, trainer = config.inference, config.trainer
    given = inference.model_fields_set & {"share_gpus", "colocated"}
    if given or inference.inference_backend != "sglang":
        return config
    shared = _with_inference(config, share_gpus=True)
    sizes = (trainer.num_processes, gpus_per_server(inference), inference.num_inference_servers)
    is_single = sizes == (1, 1, 1) and len(visible_gpus(config.run.num_gpus)) == 1
    return shared if is_single and not any(broken_rules(shared, "share_gpus")) else config


def settled(
    typed: RootConfig, config: RootConfig, model_path: Path, gpu_bytes: int | None = None
) -> tuple[RootConfig, list[str]]:
    """Return the configuration with the servers' part of shared GPUs, and lines about it."""
    if not config.inference.share_gpus:
        return config, []
    shortage = None if config.run.fresh else shortage_of(config.run.output_path)
    is_chosen = not typed.inference.share_gpus
    if is_chosen and shortage is not None:
        return _taking_turns(typed, config, shortage)
    lines = [] if shortage is None else [f"warning: --share_gpus again, although {shortage}"]
    memory = _shared_memory(config, model_path, gpu_bytes or _gpu_bytes(config))
    is_given = "inf_mem_ratio" in typed.inference.model_fields_set
    if memory is None:
        problem = None if is_given and not is_chosen else _UNKNOWN
        ratio = config.inference.inf_mem_ratio
    else:
        ratio = config.inference.inf_mem_ratio if is_given else memory.server_ratio
        problem = memory.problem(ratio)
        config = _with_inference(config, inf_mem_ratio=ratio) if problem is None else config
    if problem is not None:
        if is_chosen:
            return _taking_turns(typed, config, problem)
        raise ConfigError(f"--share_gpus: {problem}; let both take turns with --colocated")
    config = _publishing_by_handles(typed, config)
    if memory is not None:
        chosen = (
            "one GPU: trainer and server share it (--share_gpus)" if is_chosen else "--share_gpus"
        )
        lines.append(f"{chosen}, --inf_mem_ratio {ratio:g}: {memory.line(ratio)}")
    return config, lines


def _publishing_by_handles(typed: RootConfig, config: RootConfig) -> RootConfig:
    """Return the configuration with `--weight_sync ipc`, if that works and no other was given."""
    by_handles = config.publish.model_copy(update={"weight_sync": "ipc"})
    handed = config.model_copy(update={"publish": by_handles})
    is_given = "weight_sync" in typed.publish.model_fields_set
    return config if is_given or any(ipc_contradictions(handed)) else handed


def _taking_turns(
    typed: RootConfig, config: RootConfig, reason: str
) -> tuple[RootConfig, list[str]]:
    turns = _with_inference(config, share_gpus=False, colocated=True)
    if any(broken_rules(turns, "colocated")):
        placed(typed)  # raises the error of too few GPUs
    return turns, [f"one GPU: trainer and server take turns (--colocated), because {reason}"]


def _gpu_bytes(config: RootConfig) -> int | None:
    given = config.run.gpu_memory_gb
    return smallest_gpu_bytes() if given is None else int(given * _GB)


def _shared_memory(
    config: RootConfig, model_path: Path, gpu_bytes: int | None
) -> SharedMemory | None:
    """Return the division of a GPU; None if its memory, or the demand, is unknown."""
    target = next(iter(hooks("gpu_demands").values()), None)
    if gpu_bytes is None or target is None:
        return None
    measure: MeasureDemand = imported(target)
    return SharedMemory(gpu_bytes, measure(config, model_path))


def _with_inference(config: RootConfig, **values: Any) -> RootConfig:
    inference = config.inference.model_copy(update=values)
    return config.model_copy(update={"inference": inference})


def _gb(size: float) -> str:
    return f"{size / _GB:.1f} GB"

"""The machines that a plan assumes: this machine, or described ones."""

import os
from dataclasses import dataclass, replace
from typing import Self

import psutil

from agentrl.errors import ConfigError
from agentrl.runtime.gpus import GPU_MODELS, GpuModel, gpu_model, machine_gpus, smallest_gpu_bytes

GB = 10**9
NETWORK_GB_PER_SECOND = 10.0
"""Default bandwidth from the trainer to a server: slightly less than 100 Gbit/s."""
_RESERVED_BYTES = 2 * GB
"""Memory of each GPU outside torch's tensors: CUDA context, NCCL, workspaces, fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """The resources of the run."""

    gpu: GpuModel | None
    """None if trainer and servers compute on the CPU."""
    host_bytes: int
    """Memory of a machine."""
    cores: int
    """Cores of a machine."""
    network_gb_per_second: float = NETWORK_GB_PER_SECOND

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a GPU available to tensors."""
        return 0 if self.gpu is None else (self.gpu.memory_mib << 20) - _RESERVED_BYTES

    def with_gpu_memory(self, gigabytes: float | None) -> Self:
        """Return the cluster whose GPUs have this memory; None changes nothing."""
        if self.gpu is None or gigabytes is None:
            return self
        return replace(self, gpu=replace(self.gpu, memory_mib=int(gigabytes * GB) >> 20))


def this_machine(*, has_gpus: bool) -> Cluster | None:
    """Return the resources of this machine; None if its GPUs are unknown."""
    cluster = Cluster(None, psutil.virtual_memory().total, os.cpu_count() or 1)
    if not has_gpus:
        return cluster
    gpus = machine_gpus()
    found = gpu_model(gpus[0].name) if gpus else None
    if found is None:
        return None
    smallest = smallest_gpu_bytes()
    size = found.memory_mib if smallest is None else smallest >> 20
    return replace(cluster, gpu=replace(found, memory_mib=size))


def named_gpu(name: str) -> GpuModel:
    """Return the GPU model with this name."""
    found = gpu_model(name)
    if found is None:
        known = ", ".join(model.name for model in GPU_MODELS)
        raise ConfigError(f"--gpu {name}: unknown GPU; known: {known}")
    return found

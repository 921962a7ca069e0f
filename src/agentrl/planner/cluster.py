"""The machines that a plan is made for: this one, or one that is only described."""

import os
from dataclasses import dataclass, replace

import psutil

from agentrl.errors import ConfigError
from agentrl.runtime.gpus import GPU_MODELS, GpuModel, gpu_model, machine_gpus

GB = 10**9
NETWORK_GB_PER_SECOND = 10.0
"""From the trainer to a server, where nothing is said: a little less than 100 Gbit/s."""
_RESERVED_BYTES = 2 * GB
"""Of each GPU, for what torch's tensors do not show: the CUDA context, NCCL, workspaces, gaps."""


@dataclass(frozen=True)
class Cluster:
    """What the run has."""

    gpu: GpuModel | None
    """None: trainer and servers compute on the CPU."""
    host_bytes: int
    """Memory of a machine."""
    cores: int
    """Of a machine."""
    network_gb_per_second: float = NETWORK_GB_PER_SECOND

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a GPU that tensors may take."""
        return 0 if self.gpu is None else (self.gpu.memory_mib << 20) - _RESERVED_BYTES


def this_machine(*, has_gpus: bool) -> Cluster | None:
    """Return what this machine has; None if nothing is known of its GPUs.

    Args:
        has_gpus: whether trainer and servers use GPUs.
    """
    cluster = Cluster(None, psutil.virtual_memory().total, os.cpu_count() or 1)
    if not has_gpus:
        return cluster
    gpus = machine_gpus()
    found = gpu_model(gpus[0].name) if gpus else None
    if found is None:
        return None
    # The smallest counts: all ranks hold equal shares.
    sizes = [gpu.total_mib for gpu in gpus if gpu.total_mib]
    return replace(cluster, gpu=replace(found, memory_mib=min(sizes, default=found.memory_mib)))


def named_gpu(name: str) -> GpuModel:
    """Return the kind of GPU that a person named.

    Raises:
        ConfigError: it is not known.
    """
    found = gpu_model(name)
    if found is None:
        known = ", ".join(model.name for model in GPU_MODELS)
        raise ConfigError(f"--gpu {name}: unknown GPU; known: {known}")
    return found

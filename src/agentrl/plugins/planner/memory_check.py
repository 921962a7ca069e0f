"""Whether a run fits the memory of its GPUs, before anything of it is started."""

from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.plugins.planner.cluster import this_machine
from agentrl.plugins.planner.cluster_plan import ClusterPlan, plan_cluster


def planned_memory(config: RootConfig, gpus: GpuMap, model_path: Path) -> ClusterPlan | str | None:
    """Return the plan for the GPUs of this machine; a note if they are unknown, None without any.

    Args:
        config: the checked configuration, with its number of servers.
        gpus: the GPUs of its processes.
        model_path: the model's directory.

    Raises:
        ConfigError: the model cannot be planned for.
    """
    cluster = this_machine(has_gpus=True) if gpus.trainer else None
    if cluster is None:
        return "GPU model unknown; name it with `agentrl plan --gpu`" if gpus.names else None
    return plan_cluster(config, model_path, cluster.with_gpu_memory(config.run.gpu_memory_gb))

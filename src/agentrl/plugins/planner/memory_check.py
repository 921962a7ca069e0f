"""Whether a run fits the memory of its GPUs, before anything of it is started."""

from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.launcher.cluster.gpu_sharing import GpuDemand
from agentrl.plugins.planner.cluster import this_machine
from agentrl.plugins.planner.cluster_plan import ClusterPlan, plan_cluster, planned_server
from agentrl.plugins.planner.rehearsals import rehearsed_rank


def planned_memory(config: RootConfig, gpus: GpuMap, model_path: Path) -> ClusterPlan | str | None:
    """Return the plan for the GPUs of this machine; a note if they are unknown, None without any."""
    cluster = this_machine(has_gpus=True) if gpus.trainer else None
    if cluster is None:
        return "GPU model unknown; name it with `agentrl plan --gpu`" if gpus.names else None
    return plan_cluster(config, model_path, cluster.with_gpu_memory(config.run.gpu_memory_gb))


def rehearsed_demand(config: RootConfig, model_path: Path) -> GpuDemand:
    """Rehearse the trainer's step, and return what it and a server need of a GPU."""
    rank = rehearsed_rank(config, model_path, on_gpu=True)
    served = planned_server(config, model_path, rank)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    return GpuDemand(rank.peak, served.weights, served.cache(longest))

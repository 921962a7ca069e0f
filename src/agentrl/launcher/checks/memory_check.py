"""Whether a run fits the memory of its GPUs, before anything of it is started."""

from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.planner.cluster import this_machine
from agentrl.planner.cluster_plan import ClusterPlan, plan_cluster


def planned_memory(config: RootConfig, gpus: GpuMap, model_path: Path) -> ClusterPlan | None:
    """Return the plan for the GPUs of this machine; None without known GPUs.

    Args:
        config: the checked configuration, with its number of servers.
        gpus: the GPUs of its processes.
        model_path: the model's directory.

    Raises:
        ConfigError: the model cannot be planned for.
    """
    cluster = this_machine(has_gpus=True) if gpus.trainer else None
    return None if cluster is None else plan_cluster(config, model_path, cluster)


def check_memory(config: RootConfig, gpus: GpuMap, model_path: Path) -> list[str]:
    """Check that the GPUs can hold a run; see `planned_memory` for the arguments.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: the configuration does not fit; the message names flags that would fit.
    """
    plan = planned_memory(config, gpus, model_path)
    if plan is None:
        return []
    if plan.problems:
        remedies = [remedy.flags for remedy in plan.remedies]
        hint = f"; it fits with {' or '.join(remedies)}" if remedies else ""
        raise ConfigError(f"{plan.problems[0]}{hint} (`agentrl plan` shows the parts)")
    return [f"memory: {plan.rank_words}"]

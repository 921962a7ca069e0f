"""`agentrl plan`: compute the memory of a configuration on a cluster that need not exist."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from agentrl.config.command_line import FlagCommand, Number
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError

_POSITIVE = Number(0, min_open=True)


@click.command("plan", cls=FlagCommand)
@click.option(
    "--gpu", metavar="NAME", help="GPU model (H100, A100, ...); this machine's by default."
)
@click.option(
    "--host_memory_gb", type=_POSITIVE, help="Memory of a machine; this machine's by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(config: RootConfig, gpu: str | None, host_memory_gb: float | None, as_json: bool) -> int:
    """Compute whether the memory of a cluster suffices for a run with these flags.

    No GPU and no weights are needed, only the model's config.json. --num_gpus is the number of GPUs
    of a machine. The trainer's own code runs one step on tensors without memory, which takes some
    seconds for a model of any size. The exit status is 2 if the run does not fit.
    """
    from agentrl.launcher.cluster.gpu_placement import placed
    from agentrl.launcher.cluster.gpu_sharing import settled, sharing_by_default
    from agentrl.launcher.model_limits import fitted_to_model
    from agentrl.plugins.planner.memory_plan import GB, named_gpu, plan_memory, this_machine

    if gpu is not None and not config.run.num_gpus:
        raise ConfigError(f"--gpu {gpu}: give the number of GPUs with --num_gpus")
    typed = config
    config, gpus = placed(sharing_by_default(config))
    cluster = this_machine(has_gpus=bool(gpus.trainer) and gpu is None)
    if cluster is None:
        raise ConfigError("GPU model unknown; name a similar one with --gpu")
    if gpu is not None:
        cluster = replace(cluster, gpu=named_gpu(gpu))
    cluster = cluster.with_gpu_memory(config.run.gpu_memory_gb)
    if host_memory_gb is not None:
        cluster = replace(cluster, host_bytes=int(host_memory_gb * GB))
    path = _model_directory(config.model.model_name_or_path)
    device: Literal["cpu", "gpu"] = "cpu" if cluster.gpu is None else "gpu"
    config, _ = fitted_to_model(config, path, trains_on=device, samples_on=device)
    gpu_bytes = None if cluster.gpu is None else cluster.gpu.memory_mib << 20
    config, sharing = settled(typed, config, path, gpu_bytes)
    found = plan_memory(config, path, cluster)
    print(json.dumps(found.parts(), indent=2) if as_json else "\n".join([*sharing, *found.lines()]))
    return ConfigError.exit_status if found.problems else 0


def _model_directory(name_or_path: str) -> Path:
    """Return a directory with config.json; a local directory needs no other file."""
    from agentrl.models.checkpoints.resolve import resolve_model

    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path.absolute()
    return resolve_model(name_or_path, with_weights=False)

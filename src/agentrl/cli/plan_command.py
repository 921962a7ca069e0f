"""`agentrl plan`: what a configuration takes of a cluster that may not exist yet."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from agentrl.config.command_line import Count, FlagCommand
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


class _Positive(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


@click.command("plan", cls=FlagCommand)
@click.option(
    "--gpu", metavar="NAME", help="Kind of GPU (H100, A100, ...); this machine's by default."
)
@click.option(
    "--gpu_memory_gb",
    type=_Positive(),
    help="Memory of a GPU in 10^9 bytes; the kind's by default.",
)
@click.option(
    "--host_memory_gb", type=_Positive(), help="Memory of a machine; this one's by default."
)
@click.option(
    "--network_gb", type=_Positive(), help="Gigabytes a second from the trainer to a server. [10]"
)
@click.option("--turns", type=_Positive(), default=4.0, help="Model calls of a record. [4]")
@click.option(
    "--record_tokens", type=Count(), help="Tokens of a record; half of the longest by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    config: RootConfig,
    gpu: str | None,
    gpu_memory_gb: float | None,
    host_memory_gb: float | None,
    network_gb: float | None,
    turns: float,
    record_tokens: int | None,
    as_json: bool,
) -> int:
    """Say whether a run with these flags fits, what limits it, and what would fit.

    No GPU is needed, and no weights are read: of the model, config.json is enough. --num_gpus says how
    many GPUs a machine has. The trainer's own code makes a step on tensors without memory, which takes
    some seconds for a model of any size. The exit status is 2 where the run does not fit.
    """
    from agentrl.launcher.fitted_values import fitted_to_model
    from agentrl.launcher.gpu_placement import placed
    from agentrl.planner.cluster import GB, named_gpu, this_machine
    from agentrl.planner.cluster_plan import plan_cluster, usual_workload

    if gpu is not None and not config.run.num_gpus:
        raise ConfigError(f"--gpu {gpu}: say with --num_gpus how many there are")
    config, gpus = placed(config)
    cluster = this_machine(has_gpus=bool(gpus.trainer) and gpu is None)
    if cluster is None:
        raise ConfigError("the kind of GPU is not known here; name one like it with --gpu")
    if gpu is not None:
        cluster = replace(cluster, gpu=named_gpu(gpu))
    if cluster.gpu is not None and gpu_memory_gb is not None:
        size = int(gpu_memory_gb * GB) >> 20
        cluster = replace(cluster, gpu=replace(cluster.gpu, memory_mib=size))
    if host_memory_gb is not None:
        cluster = replace(cluster, host_bytes=int(host_memory_gb * GB))
    if network_gb is not None:
        cluster = replace(cluster, network_gb_per_second=network_gb)
    path = _described_model(config.model.model_name_or_path)
    config, _ = fitted_to_model(config, path)
    workload = usual_workload(config, turns, record_tokens)
    found = plan_cluster(config, path, cluster, workload)
    print(json.dumps(found.parts(), indent=2) if as_json else "\n".join(found.lines()))
    return ConfigError.exit_status if found.problems else 0


def _described_model(name_or_path: str) -> Path:
    """Return a directory with config.json: a local one needs nothing else."""
    from agentrl.models.resolve import resolve_model

    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path.absolute()
    return resolve_model(name_or_path, with_weights=False)

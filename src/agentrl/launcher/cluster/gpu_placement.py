"""Assigns the GPUs of this machine to the processes of a run.

Input: a checked configuration and the GPUs that this process may use. Output: the configuration
with as many servers as the machine has room for, and the map from processes to GPUs, which children
receive as `CUDA_VISIBLE_DEVICES`. Nothing is started.

    GPUs     0  1  2  3 │ 4  5 │ 6  7
    trainer  0  1  2  3 │      │         one rank each
    servers             │  0   │  1      --inf_tp_size 2: one group each, kept together
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.config.gpu_lists import in_words
from agentrl.config.sections import InferenceSection, RootConfig
from agentrl.config.validation.placement_checks import ON_GPUS, gpus_per_server, sglang_words
from agentrl.errors import ConfigError
from agentrl.runtime.gpus import VISIBLE, visible_gpus

_ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class GpuMap:
    """The GPUs of every process, as indices into those that this process may use.

    Without GPUs the map is empty, and children see what this process sees.
    """

    names: tuple[str, ...] = ()
    """Name of each GPU in CUDA_VISIBLE_DEVICES."""
    trainer: tuple[int, ...] = ()
    """The GPU of each trainer rank."""
    servers: tuple[tuple[int, ...], ...] = field(default=())
    """The GPUs of each inference server; none for servers that compute on the CPU."""

    @property
    def free(self) -> tuple[int, ...]:
        """GPUs of neither trainer nor servers: samplers (scorers, agents) and tools see these."""
        taken = {*self.trainer, *(gpu for group in self.servers for gpu in group)}
        return tuple(gpu for gpu in range(len(self.names)) if gpu not in taken)

    @property
    def trains_on(self) -> Literal["cpu", "gpu"]:
        """The device of the trainer."""
        return "gpu" if self.trainer else "cpu"

    def samples_on(self, inference: InferenceSection) -> Literal["cpu", "gpu"] | None:
        """Return the device of the inference servers; None for servers that are already there."""
        if inference.inference_urls:
            return None
        return "gpu" if any(self.servers) else "cpu"

    def environment(self, gpus: Sequence[int]) -> dict[str, str]:
        """Return the variables that show a child these GPUs and no others."""
        if not self.names:
            return {}
        variables = {VISIBLE: ",".join(self.names[gpu] for gpu in gpus)}
        if VISIBLE not in os.environ:
            # The indices are those of nvidia-smi; CUDA's default order may differ.
            variables[_ORDER] = "PCI_BUS_ID"
        return variables

    def of_server(self, number: int) -> tuple[int, ...]:
        """Return the GPUs of one server."""
        return self.servers[number] if number < len(self.servers) else ()

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield every kind of process with its GPUs, for display."""
        if not self.names:
            return
        if self.trainer:
            last = len(self.trainer) - 1
            ranks = f"ranks 0-{last}" if last else "rank 0"
            yield "trainer", f"{ranks} on {self._text(self.trainer)}"
        for number, group in enumerate(self.servers):
            shared = ", shared with the trainer" if {*group} & {*self.trainer} else ""
            yield f"server {number}", f"{self._text(group)}{shared}"
        yield "others", self._text(self.free)

    def _text(self, gpus: Sequence[int]) -> str:
        if not gpus:
            return "no GPU"
        text = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {in_words(gpus)}"
        names = [self.names[gpu] for gpu in gpus]
        return text if names == [str(gpu) for gpu in gpus] else f"{text} ({','.join(names)})"


NO_GPUS = GpuMap()


def placed(config: RootConfig, *, trains: bool = True) -> tuple[RootConfig, GpuMap]:
    """Return the configuration with its number of servers, and the map.

    Trainer ranks take the first GPUs unless flags name others; servers take as many of the
    remaining ones as `--num_inference_servers` requests, or all of them. With `--colocated` or
    `--share_gpus`, both have the same.
    """
    names = visible_gpus(config.run.num_gpus)
    trainer, inference = config.trainer, config.inference
    # The embedded engine runs on GPUs only where a flag gives it some.
    on_gpus = inference.inference_backend == "sglang" or (
        inference.inference_backend in ON_GPUS
        and bool(inference.inference_gpus or inference.is_on_trainer_gpus)
    )
    starts_servers = (
        on_gpus and not inference.inference_urls and (config.rollout.enable_sampling or not trains)
    )
    for flag, requested in (
        ("trainer_gpus", trainer.trainer_gpus if trains else ()),
        ("inference_gpus", inference.inference_gpus if starts_servers else ()),
    ):
        if missing := [gpu for gpu in requested if gpu >= len(names)]:
            raise ConfigError(
                f"--{flag} {in_words(requested)}: {_missing_text(missing, len(names))}"
            )
    if not names:
        _check_without_gpus(config, starts_servers=starts_servers, trains=trains)
        return config, NO_GPUS
    num_ranks = trainer.num_processes if trains else 0
    ranks = trainer.trainer_gpus if trains else ()
    if not ranks:
        others = [gpu for gpu in range(len(names)) if gpu not in inference.inference_gpus]
        candidates = inference.inference_gpus if inference.is_on_trainer_gpus else ()
        ranks = tuple((candidates or others)[:num_ranks])
    if not starts_servers:
        if len(ranks) < num_ranks:
            raise ConfigError(
                f"--num_processes: {num_ranks} trainer ranks need one GPU each, and this machine "
                f"has {len(names)}; start fewer, or train on the CPU with {VISIBLE}= (empty)"
            )
        return config, GpuMap(names, ranks)
    config, groups = _server_groups(config, names, ranks, num_ranks)
    return config, GpuMap(names, ranks, groups)


def _server_groups(
    config: RootConfig, names: Sequence[str], ranks: Sequence[int], num_ranks: int
) -> tuple[RootConfig, tuple[tuple[int, ...], ...]]:
    inference = config.inference
    group_size = gpus_per_server(inference)
    is_shared = inference.is_on_trainer_gpus and num_ranks > 0
    free = [gpu for gpu in range(len(names)) if gpu not in ranks]
    gpus = inference.inference_gpus or tuple(ranks if is_shared else free)
    if "num_inference_servers" not in inference.model_fields_set:
        update = {"num_inference_servers": max(1, len(gpus) // group_size)}
        inference = inference.model_copy(update=update)
        config = config.model_copy(update={"inference": inference})
    needed = group_size * inference.num_inference_servers
    if len(ranks) < num_ranks or needed > len(gpus) or (is_shared and needed < len(gpus)):
        raise ConfigError(_mismatch_text(config, num_ranks, len(names), group_size))
    groups = tuple(
        tuple(gpus[start : start + group_size]) for start in range(0, needed, group_size)
    )
    return config, groups


def _mismatch_text(config: RootConfig, num_ranks: int, num_gpus: int, group_size: int) -> str:
    """Return why ranks and servers do not fit the GPUs, and which flags to change."""
    servers = config.inference.num_inference_servers
    sizes = f"{servers} server(s) of {group_size} GPU(s)"
    if config.inference.is_on_trainer_gpus and num_ranks:
        return (
            f"{config.inference.sharing_flag}: {num_ranks} trainer rank(s) share their GPUs with {sizes}, so both must "
            f"use the same number of GPUs, and this machine has {num_gpus}; change "
            "--num_processes, --num_inference_servers or --inf_tp_size"
        )
    if not num_ranks:
        return (
            f"{sizes} need {servers * group_size} GPUs, and this machine has {num_gpus}; lower "
            "--num_inference_servers or --inf_tp_size"
        )
    return (
        f"{num_ranks} trainer rank(s) and {sizes} need {num_ranks + servers * group_size} GPUs, "
        f"and this machine has {num_gpus}; lower --num_processes, --num_inference_servers or "
        "--inf_tp_size, or let both share GPUs with --share_gpus or --colocated"
    )


def _missing_text(missing: Sequence[int], num_gpus: int) -> str:
    """Return a message that the machine lacks GPUs with these indices."""
    if not num_gpus:
        return (
            "no GPU found (nvidia-smi, CUDA_VISIBLE_DEVICES); remove the flag, or set the number "
            "of GPUs with --num_gpus"
        )
    return f"GPU {in_words(missing)} does not exist; this machine has {num_gpus}, numbered from 0"


def _check_without_gpus(config: RootConfig, *, starts_servers: bool, trains: bool) -> None:
    attention = config.model.attention_implementation
    if trains and attention in ("flex", "varlen"):
        raise ConfigError(
            f"--attention_implementation {attention}: its kernels need a GPU, and none was found "
            "(nvidia-smi, CUDA_VISIBLE_DEVICES); use auto, which computes along segments on a CPU"
        )
    is_sglang = config.inference.inference_backend == "sglang"
    if starts_servers and is_sglang and "--device" not in sglang_words(config.inference):
        raise ConfigError(
            "--inference_backend sglang: no GPU found (nvidia-smi, CUDA_VISIBLE_DEVICES); give "
            "--inference_urls, or --sglang_args='--device cpu ...' (docs/deploy.md); --num_gpus "
            "sets the number of GPUs where nvidia-smi is not available"
        )

"""The process counts that named GPUs imply, and contradictions between flags that place processes.

Input: the flags. The GPUs of the machine are not known here (`launcher.cluster.gpu_placement`). Only commands
that start ranks check their mesh.
"""

import os
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Self

from agentrl.config.gpu_lists import in_words
from agentrl.config.rules import broken_rules
from agentrl.config.sections import InferenceSection, RootConfig, TrainerSection
from agentrl.errors import ConfigError

_MAX_RANKS = 1024
_PLACEMENT_ARGUMENTS = {
    "--tp": "--inf_tp_size",
    "--tp-size": "--inf_tp_size",
    "--tensor-parallel-size": "--inf_tp_size",
    "--base-gpu-id": "--inference_gpus",
    "--gpu-id-step": "--inference_gpus",
}
"""Arguments of SGLang that place a server -> the corresponding flag of AgentRL."""
ON_GPUS = ("sglang", "embedded")
"""Values of --inference_backend whose servers can be given GPUs."""
DP_FLAGS = ("--dp", "--dp-size", "--data-parallel-size")
PP_FLAGS = ("--pp", "--pp-size", "--pipeline-parallel-size")


def sglang_words(inference: InferenceSection) -> list[str]:
    """Return `--sglang_args` word by word, `--flag=value` as two words."""
    try:
        return shlex.split(inference.sglang_args.replace("=", " "))
    except ValueError as error:
        raise ConfigError(f"--sglang_args {inference.sglang_args!r}: {error}") from None


def gpus_per_server(inference: InferenceSection) -> int:
    """Return the number of GPUs that one SGLang server computes on."""
    words = sglang_words(inference)
    count = inference.inf_tp_size
    for flags in (PP_FLAGS, () if "--enable-dp-attention" in words else DP_FLAGS):
        for flag, value in pairwise(words):
            if flag in flags and value.isdecimal():
                count *= int(value)
    return count


def with_implied_processes(config: RootConfig) -> RootConfig:
    """Return the configuration with the numbers of ranks and servers that the named GPUs imply."""
    trainer, inference = config.trainer, config.inference
    if trainer.trainer_gpus and "num_processes" not in trainer.model_fields_set:
        trainer = trainer.model_copy(update={"num_processes": len(trainer.trainer_gpus)})
    if inference.inference_gpus and "num_inference_servers" not in inference.model_fields_set:
        servers = len(inference.inference_gpus) // gpus_per_server(inference)
        inference = inference.model_copy(update={"num_inference_servers": max(1, servers)})
    return config.model_copy(update={"trainer": trainer, "inference": inference})


def placement_contradictions(config: RootConfig) -> Iterator[str]:
    """Find flags that contradict each other on any machine."""
    trainer, inference = config.trainer, config.inference
    ranks = trainer.num_processes
    if trainer.trainer_gpus and len(trainer.trainer_gpus) != ranks:
        yield (
            f"--trainer_gpus {in_words(trainer.trainer_gpus)}: {ranks} trainer ranks need one GPU "
            "each; remove --num_processes, or name as many GPUs"
        )
    for word in sglang_words(inference):
        if word in _PLACEMENT_ARGUMENTS:
            yield (
                f"--sglang_args {word}: use {_PLACEMENT_ARGUMENTS[word]} to choose the servers' GPUs"
            )
    if inference.inference_gpus:
        yield from _server_contradictions(config)


def ipc_contradictions(config: RootConfig) -> Iterator[str]:
    """Find what `--weight_sync ipc` does not support."""
    inference = config.inference
    if config.publish.weight_sync != "ipc":
        return
    yield from broken_rules(config, "weight_sync=ipc")
    sizes = (
        config.trainer.num_processes,
        gpus_per_server(inference),
        inference.num_inference_servers,
    )
    if sizes != (1, 1, 1):
        yield (
            "--weight_sync ipc supports one trainer rank and one server on one GPU; use --weight_sync "
            "disk with more"
        )


def _server_contradictions(config: RootConfig) -> Iterator[str]:
    trainer, inference = config.trainer, config.inference
    flag = f"--inference_gpus {in_words(inference.inference_gpus)}"
    if inference.inference_urls:
        yield f"{flag}: the servers of --inference_urls are already running; remove the flag"
    if not config.rollout.enable_sampling:
        yield f"{flag}: --enable_sampling false starts no servers; remove one of the two"
    gpus_each, servers = gpus_per_server(inference), inference.num_inference_servers
    if gpus_each * servers != len(inference.inference_gpus):
        yield (
            f"{flag}: {servers} servers of {gpus_each} GPUs each need {gpus_each * servers}; name as "
            "many, or change --num_inference_servers or --inf_tp_size"
        )
    common = sorted(set(trainer.trainer_gpus) & set(inference.inference_gpus))
    if common and not inference.is_on_trainer_gpus:
        yield (
            f"{flag} and --trainer_gpus share {in_words(common)}; give the servers their own "
            "GPUs, or share them with --share_gpus (concurrently) or --colocated (in turns)"
        )
    are_equal = set(trainer.trainer_gpus) == set(inference.inference_gpus)
    if trainer.trainer_gpus and inference.is_on_trainer_gpus and not are_equal:
        yield (
            f"{flag}: {inference.sharing_flag} puts trainer and servers on the same GPUs; repeat those of "
            "--trainer_gpus, or remove the flag"
        )


class MeshSizes(NamedTuple):
    """The flags of the mesh dimensions that split a model."""

    tp: int
    ep: int
    cp: int
    pp: int

    @classmethod
    def of(cls, trainer: TrainerSection) -> Self:
        """Return the sizes that the flags give."""
        return cls(tp=trainer.tp_size, ep=trainer.ep_size, cp=trainer.cp_size, pp=trainer.pp_size)


def check_ranks(trainer: TrainerSection) -> None:
    """Refuse more ranks than a machine starts, and those that do not form a mesh."""
    if os.environ.get("NUM_MACHINES", "1") not in ("", "1"):
        raise ConfigError(
            "NUM_MACHINES: `agentrl run` starts one machine; start the trainer's ranks on each machine "
            "with torchrun (docs/deploy.md), or unset it"
        )
    if trainer.num_processes > _MAX_RANKS:
        raise ConfigError(
            f"--num_processes {trainer.num_processes}: a machine starts at most {_MAX_RANKS} ranks; "
            "give one per GPU"
        )
    check_mesh(trainer, trainer.num_processes)


def check_mesh(trainer: TrainerSection, num_ranks: int) -> None:
    """Refuse ranks that do not form the requested mesh, or are too few for it."""
    if trainer.cpu_offload and num_ranks == 1:
        raise ConfigError(
            "--cpu_offload requires FSDP2, which needs several ranks; start more "
            "(--num_processes), or save memory with --gradient_checkpointing true"
        )
    mesh_size = trainer.dp_replicate_size * trainer.cp_size * trainer.ep_size * trainer.tp_size
    mesh_size *= trainer.pp_size
    if num_ranks % mesh_size:
        raise ConfigError(
            f"{num_ranks} trainer rank(s) do not match a mesh of --pp_size {trainer.pp_size} x "
            f"dp_replicate_size {trainer.dp_replicate_size} x --cp_size {trainer.cp_size} x "
            f"--ep_size {trainer.ep_size} x --tp_size {trainer.tp_size}; start a multiple of "
            f"{mesh_size} (--num_processes), or choose smaller sizes"
        )

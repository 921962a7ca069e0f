"""The process counts that named GPUs imply, and contradictions between flags that place processes.

Input: the flags. The GPUs of the machine are not known here (`launcher.cluster.gpu_placement`).
"""

import shlex
from collections.abc import Iterator
from itertools import pairwise

from agentrl.config.gpu_lists import in_words
from agentrl.config.sections import InferenceSection, RootConfig
from agentrl.errors import ConfigError

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
    """Return `--sglang_args` word by word, `--flag=value` as two words.

    Raises:
        ConfigError: a quotation mark is not closed.
    """
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


def sharing_contradictions(config: RootConfig) -> Iterator[str]:
    """Find what `--share_gpus` does not support."""
    inference = config.inference
    if not inference.share_gpus:
        return
    if inference.colocated:
        yield (
            "--share_gpus lets trainer and servers work concurrently, and --colocated in turns; give "
            "one of the two"
        )
    if inference.inference_urls:
        yield (
            "--share_gpus requires servers that AgentRL starts on the trainer's GPUs; remove "
            "--inference_urls"
        )
    elif inference.inference_backend not in ON_GPUS:
        yield (
            f"--share_gpus: --inference_backend {inference.inference_backend} starts no servers on "
            "GPUs; add --inference_backend sglang, or remove the flag"
        )
    if not config.rollout.enable_sampling:
        yield "--share_gpus requires sampling; remove it or --enable_sampling false"
    if config.publish.weight_sync == "distributed":
        yield (
            "--weight_sync distributed needs one process per GPU (NCCL), and --share_gpus puts two on "
            "each; use --weight_sync disk with --share_gpus"
        )


def ipc_contradictions(config: RootConfig) -> Iterator[str]:
    """Find what `--weight_sync ipc` does not support."""
    inference = config.inference
    if config.publish.weight_sync != "ipc":
        return
    if not (inference.share_gpus and inference.inference_backend == "sglang"):
        yield (
            "--weight_sync ipc gives SGLang on the trainer's GPU access to the trainer's memory; add "
            "--inference_backend sglang --share_gpus, or use --weight_sync disk"
        )
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
    if config.model.lora_rank:
        yield (
            "--weight_sync ipc supports whole models only; use --weight_sync disk with adapters "
            "(--lora_rank)"
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

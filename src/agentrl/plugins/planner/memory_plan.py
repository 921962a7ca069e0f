"""Whether a run fits the memory of a cluster, which need not exist: `agentrl plan`, and a run's check.

The trainer's memory is measured by running its own code on tensors without storage, in a process
that imports torch (`rehearsal`); the memory of servers follows from the shapes in `config.json`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.launcher.cluster.gpu_sharing import GpuDemand
from agentrl.models.checkpoints.architectures import decoder_config, raw_config
from agentrl.runtime.gpus import (
    GPU_MODELS,
    VISIBLE,
    GpuModel,
    gpu_model,
    machine_gpus,
    smallest_gpu_bytes,
)
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.child_processes import end_with_parent
from agentrl.runtime.processes.restarts import ending

GB = 10**9
_BYTES_OF_VALUE = 2
"""Size of bfloat16, the type of the servers' weights and cache, and of exported weights."""
_RESERVED_BYTES = 2 * GB
"""Memory of each GPU outside torch's tensors: CUDA context, NCCL, workspaces, fragmentation."""
_REHEARSAL_SECONDS = 1800.0
_CACHELESS_LAYERS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv")
"""Layers with a state of fixed size per conversation."""
_SMALLER = (
    "what helps: --gradient_checkpointing true, a smaller --max_tokens, more ranks "
    "(--num_processes), --activation_offloading true, --cpu_offload true, --lora_rank 16"
)


@dataclass(frozen=True)
class Cluster:
    """The memory of the machine and its GPUs, all of one model."""

    gpu: GpuModel | None
    """None if trainer and servers compute on the CPU."""
    host_bytes: int

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
    """Return the memory of this machine; None if its GPUs are unknown."""
    cluster = Cluster(None, psutil.virtual_memory().total)
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


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Memory of passes besides these three: activations, logits, gathered and rounded weights."""
    peak: int
    """Peak memory on the device."""
    host: int
    """Peak host memory, if the device has separate memory."""
    num_parameters: int
    num_trained: int


def rehearsed_rank(config: RootConfig, model_path: Path, *, on_gpu: bool) -> RankMemory:
    """Rehearse the largest step that the flags allow, and return the memory of the fullest rank."""
    measured = _rehearse(
        {
            "model": config.model.model_dump(mode="json"),
            "trainer": config.trainer.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "model_path": str(model_path),
            "longest": _longest(config),
            "device": "gpu" if on_gpu else "cpu",
        }
    )
    state_bytes = measured["weights"] + measured["gradients"] + measured["optimizer"]
    host = measured.pop("offloaded")
    if on_gpu and config.trainer.cpu_offload:
        # With offloading, passes copy one layer at a time to the device.
        measured["peak"], host = measured["activations"], host + state_bytes
    elif on_gpu and config.inference.colocated:
        host += measured["weights"] + measured["optimizer"]  # while the servers sample
    return RankMemory(host=host, **measured)


def _rehearse(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a process that imports torch; it sees no GPU, since it simulates one."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "agentrl.plugins.planner.rehearsal"],
            input=json.dumps(request),
            env={**os.environ, VISIBLE: ""},
            capture_output=True,
            text=True,
            timeout=_REHEARSAL_SECONDS,
            check=False,
            preexec_fn=end_with_parent(signal.SIGKILL),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"cannot rehearse a step of this model within {_REHEARSAL_SECONDS:.0f} s"
        ) from None
    if process.returncode != 0:
        said = process.stderr.strip().splitlines() or [f"the process {ending(process.returncode)}"]
        raise ConfigError(f"cannot rehearse a step of this model: {one_line(said[-1], 500)}")
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


@dataclass(frozen=True)
class ServedModel:
    """Bytes on one GPU of a server."""

    weights: int
    cache_per_token: int
    """Cache of layers with full attention; a layer with a window caches only its window."""
    cache_per_window: int
    """Cache of all layers with a window, for one conversation that fills it."""

    def cache(self, num_tokens: int) -> int:
        """Return the bytes of one conversation."""
        return self.cache_per_token * num_tokens + self.cache_per_window


def served_model(config: Any, num_parameters: int, *, tp_size: int = 1) -> ServedModel:
    """Return the memory on one GPU of a server, from a model's raw configuration."""
    values = vars(decoder_config(config))
    num_layers = values["num_hidden_layers"]
    kinds = values.get("layer_types") or ["full_attention"] * num_layers
    kinds = [kind for kind in kinds if kind not in _CACHELESS_LAYERS]
    window = values.get("sliding_window") or 0
    num_windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    bytes_per_layer = _cached_per_layer(values, tp_size) * _BYTES_OF_VALUE
    return ServedModel(
        weights=num_parameters * _BYTES_OF_VALUE // tp_size,
        cache_per_token=(len(kinds) - num_windowed) * bytes_per_layer,
        cache_per_window=num_windowed * bytes_per_layer * window,
    )


def _cached_per_layer(values: dict[str, Any], tp_size: int) -> int:
    """Return how many numbers a layer caches per token."""
    if values.get("kv_lora_rank"):
        # Latent attention keeps one vector for all heads, on every GPU.
        return int(values["kv_lora_rank"]) + int(values.get("qk_rope_head_dim") or 0)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    head_size = values.get("head_dim") or values["hidden_size"] // heads
    return 2 * int(head_size) * max(1, int(kv_heads) // tp_size)


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory use of a run; a `RunCheck`."""

    config: RootConfig
    cluster: Cluster
    rank: RankMemory
    served: ServedModel

    @property
    def problems(self) -> tuple[str, ...]:
        """The parts that do not fit."""
        return tuple(self._problems())

    @property
    def note(self) -> str:
        """What fits, in one line."""
        return f"memory: {self._rank_words}"

    def parts(self) -> dict[str, Any]:
        """Return the plan as a JSON object; sizes are in bytes."""
        return {
            "fits": not self.problems,
            "problems": list(self.problems),
            "trainer": {
                **asdict(self.rank),
                "ranks": self.config.trainer.num_processes,
                "device_bytes": self._device_bytes,
            },
            "servers": {
                **asdict(self.served),
                "servers": self._num_servers,
                "cache_bytes": self._cache_bytes,
                "cached_tokens": self._cached_tokens,
            },
            "exported_bytes": self._exported_bytes,
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text lines; the most important come last, next to the prompt."""
        rank, trainer = self.rank, self.config.trainer
        gpu = self.cluster.gpu
        yield f"trainer: {trainer.num_processes} rank(s) on {'CPU' if gpu is None else gpu.name}"
        states = f"gradients {_gb(rank.gradients)}, AdamW {_gb(rank.optimizer)}"
        yield f"  weights {_gb(rank.weights)}, {states}"
        yield f"  activations {_gb(rank.activations)}, peak {_gb(rank.peak)}"
        host = f"; {_gb(rank.host)} in host memory" if rank.host else ""
        yield f"  of {_gb(self._device_bytes)} per rank{host}"
        gpus = f"of {self.config.inference.inf_tp_size} GPU(s)"
        yield f"servers: {self._num_servers} {gpus if self._server_gpu else 'on the CPU'}"
        cache = f"cache {self.served.cache_per_token / 1024:.0f} KiB per token"
        yield f"  weights {_gb(self.served.weights)}, {cache}"
        yield f"  cache for {self._cached_tokens:,} tokens"
        for problem in self.problems:
            yield f"DOES NOT FIT: {problem}"
        if rank.peak > self._device_bytes:
            yield _SMALLER
        elif not self.problems:
            yield "fits"

    def _problems(self) -> Iterator[str]:
        rank, cluster = self.rank, self.cluster
        num_ranks = self.config.trainer.num_processes
        if rank.peak > self._device_bytes:
            yield self._rank_words
        # The memory into which rank 0 exports is page-locked, and stays with it.
        kept = rank.host * num_ranks + self._exported_bytes
        if cluster.gpu is not None and kept > cluster.host_bytes:
            yield (
                f"{num_ranks} rank(s) keep {_gb(kept)} in host memory, exported weights "
                f"included, and the machine has {_gb(cluster.host_bytes)}"
            )
        longest = _longest(self.config)
        if self.served.cache(longest) > self._cache_bytes:
            yield (
                f"a server has {_gb(self._cache_bytes)} of cache per GPU, and the longest "
                f"conversation of {longest:,} tokens needs {_gb(self.served.cache(longest))}; "
                "raise --inf_tp_size, or lower --max_prompt_tokens"
            )

    @property
    def _rank_words(self) -> str:
        """Memory that a rank needs and has, as text."""
        return f"a trainer rank needs {_gb(self.rank.peak)}, and has {_gb(self._device_bytes)}"

    @property
    def _device_bytes(self) -> int:
        """Memory available to a rank."""
        if self.cluster.gpu is not None:
            inference = self.config.inference
            servers = inference.inf_mem_ratio if inference.share_gpus else 0
            return self.cluster.gpu_bytes - int(servers * (self.cluster.gpu.memory_mib << 20))
        return self.cluster.host_bytes // self.config.trainer.num_processes

    @property
    def _exported_bytes(self) -> int:
        is_adapter = self.config.model.lora_rank
        values = self.rank.num_trained if is_adapter else self.rank.num_parameters
        return values * _BYTES_OF_VALUE

    @property
    def _server_gpu(self) -> GpuModel | None:
        """The servers' GPU model; None for the embedded engine, which computes on the CPU."""
        inference = self.config.inference
        is_embedded = inference.inference_backend == "embedded" and not inference.inference_urls
        return None if is_embedded else self.cluster.gpu

    @property
    def _num_servers(self) -> int:
        inference = self.config.inference
        return len(inference.inference_urls) or inference.num_inference_servers

    @property
    def _cache_bytes(self) -> int:
        """Bytes of cache on one GPU of a server."""
        if self._server_gpu is None:
            return max(0, self.cluster.host_bytes // 2 - self.served.weights)
        memory = self._server_gpu.memory_mib << 20
        return max(0, int(memory * self.config.inference.inf_mem_ratio) - self.served.weights)

    @property
    def _cached_tokens(self) -> int:
        """Tokens of conversations that one server can cache."""
        return self._cache_bytes // max(1, self.served.cache_per_token)


def plan_memory(config: RootConfig, model_path: Path, cluster: Cluster) -> MemoryPlan:
    """Rehearse the trainer's step and compute the rest."""
    rank = rehearsed_rank(config, model_path, on_gpu=cluster.gpu is not None)
    return MemoryPlan(config, cluster, rank, _planned_server(config, model_path, rank))


def planned_memory(config: RootConfig, gpus: GpuMap, model_path: Path) -> MemoryPlan | str | None:
    """Return the plan for the GPUs of this machine; a note if they are unknown, None without any."""
    cluster = this_machine(has_gpus=True) if gpus.trainer else None
    if cluster is None:
        return "GPU model unknown; name it with `agentrl plan --gpu`" if gpus.names else None
    return plan_memory(config, model_path, cluster.with_gpu_memory(config.run.gpu_memory_gb))


def rehearsed_demand(config: RootConfig, model_path: Path) -> GpuDemand:
    """Return what the trainer's rehearsed step and a server need of a GPU."""
    rank = rehearsed_rank(config, model_path, on_gpu=True)
    served = _planned_server(config, model_path, rank)
    return GpuDemand(rank.peak, served.weights, served.cache(_longest(config)))


def _planned_server(config: RootConfig, model_path: Path, rank: RankMemory) -> ServedModel:
    tp_size = config.inference.inf_tp_size
    try:
        return served_model(raw_config(model_path), rank.num_parameters, tp_size=tp_size)
    except KeyError as error:
        raise ConfigError(f"{model_path / 'config.json'} lacks {error}") from None


def _longest(config: RootConfig) -> int:
    """Return the tokens of the longest conversation."""
    return config.sampling.max_prompt_tokens + config.sampling.max_new_tokens


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"

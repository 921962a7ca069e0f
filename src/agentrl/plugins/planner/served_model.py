"""Memory of a model on inference servers, and the load that the remaining memory supports.

Input: the raw config.json; nothing else of the model is read.
"""

from dataclasses import dataclass
from typing import Any

from agentrl.config.sections import InferenceSection
from agentrl.models.checkpoints.architectures import decoder_config
from agentrl.plugins.planner.cluster import GB, Cluster
from agentrl.runtime.gpus import GpuModel

SERVER_SHARE = 0.6
"""Fraction of a GPU's bandwidth that decoding reaches."""

BYTES_OF_VALUE = 2
"""Size of bfloat16, the type of the servers' weights and cache."""
_CACHELESS_LAYERS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv")
"""Layers with a state of fixed size per conversation."""


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
    """Return the memory on one GPU of a server."""
    values = vars(decoder_config(config))
    num_layers = values["num_hidden_layers"]
    kinds = values.get("layer_types") or ["full_attention"] * num_layers
    kinds = [kind for kind in kinds if kind not in _CACHELESS_LAYERS]
    window = values.get("sliding_window") or 0
    num_windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    bytes_per_layer = _cache_per_layer(values, tp_size) * BYTES_OF_VALUE
    return ServedModel(
        weights=num_parameters * BYTES_OF_VALUE // tp_size,
        cache_per_token=(len(kinds) - num_windowed) * bytes_per_layer,
        cache_per_window=num_windowed * bytes_per_layer * window,
    )


def _cache_per_layer(values: dict[str, Any], tp_size: int) -> int:
    """Return how many numbers a layer caches per token."""
    if values.get("kv_lora_rank"):
        # Latent attention keeps one vector for all heads, on every GPU.
        return int(values["kv_lora_rank"]) + int(values.get("qk_rope_head_dim") or 0)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    head_size = values.get("head_dim") or values["hidden_size"] // heads
    return 2 * int(head_size) * max(1, int(kv_heads) // tp_size)


@dataclass(frozen=True)
class Servers:
    """The servers of a run."""

    inference: InferenceSection
    cluster: Cluster
    model: ServedModel
    record_tokens: int
    """Tokens of a finished record."""

    @property
    def gpu(self) -> GpuModel | None:
        """Their GPU model; None for the embedded engine, which computes on the CPU."""
        is_embedded = self.inference.inference_backend == "embedded"
        return None if is_embedded and not self.inference.inference_urls else self.cluster.gpu

    @property
    def count(self) -> int:
        """The number of servers."""
        return len(self.inference.inference_urls) or self.inference.num_inference_servers

    @property
    def cache_bytes(self) -> int:
        """Bytes of cache on one GPU of a server."""
        if self.gpu is None:
            return max(0, self.cluster.host_bytes // 2 - self.model.weights)
        memory = self.gpu.memory_mib << 20
        return max(0, int(memory * self.inference.inf_mem_ratio) - self.model.weights)

    @property
    def cached_tokens(self) -> int:
        """Tokens of conversations that one server can cache."""
        return self.cache_bytes // max(1, self.model.cache_per_token)

    @property
    def conversations(self) -> int:
        """Conversations that one server decodes concurrently."""
        num_cached = self.cache_bytes // max(1, self.model.cache(self.record_tokens))
        return min(self.inference.max_running_requests, num_cached)

    @property
    def tokens_per_second(self) -> float:
        """Sampling rate of all servers: each round reads weights and cache once; 0 on CPUs."""
        if self.gpu is None or not self.conversations:
            return 0.0
        cache = self.conversations * self.model.cache(self.record_tokens // 2)
        rounds = self.gpu.gb_per_second * GB * SERVER_SHARE / (self.model.weights + cache)
        return self.count * self.conversations * rounds

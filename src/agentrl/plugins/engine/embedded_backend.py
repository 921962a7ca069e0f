"""The embedded engine as inference server of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.inference.weight_sync.version_files import weight_bytes
from agentrl.runtime.gpus import seen_gpus

_LEAST_CACHE_BYTES = 1 << 20


class EmbeddedBackend:
    """Starts servers of the embedded engine; an `agentrl.inference.supervisor.server_backend`."""

    start_seconds = 120.0

    def command(
        self, common: Sequence[str], *, inference: InferenceSection, model: ModelSection, seed: int
    ) -> list[str]:
        """Return the argv of a server; the engine's flags do not depend on `model`."""
        engine = [sys.executable, "-P", "-m", "agentrl.plugins.engine"]
        model_path = Path(common[common.index("--model-path") + 1])
        shared = _cache_flags(inference, model_path) if inference.share_gpus else []
        return [*engine, *common, "--seed", str(seed), *_embedded_flags(inference), *shared]


EMBEDDED = EmbeddedBackend()


def _cache_flags(inference: InferenceSection, model_path: Path) -> list[str]:
    """Return the cache that the server's part of a shared GPU leaves beside the weights.

    Weights are taken as large as their files, and an eighth of the rest keeps ended sequences.
    """
    sizes = [gpu.total_mib << 20 for gpu in seen_gpus() if gpu.total_mib is not None]
    if not sizes:
        return []
    cache = int(min(sizes) * inference.inf_mem_ratio) - weight_bytes(model_path)
    ended = max(cache, _LEAST_CACHE_BYTES) // 8
    running = max(cache - ended, _LEAST_CACHE_BYTES)
    return ["--kv-cache-bytes", str(running), "--prefix-cache-bytes", str(ended)]


def _embedded_flags(inference: InferenceSection) -> list[str]:
    argv: list[str] = []
    if inference.inference_request_log is not None:
        argv += ["--log-requests", str(inference.inference_request_log)]
    for root in inference.weight_roots:
        argv += ["--weight-root", str(root)]
    if inference.inference_threads is not None:
        argv += ["--num-threads", str(inference.inference_threads)]
    return argv

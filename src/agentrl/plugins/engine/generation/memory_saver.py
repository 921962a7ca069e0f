"""`MemorySaver`: memory that the engine releases temporarily and allocates again.

Weights come back without their values, as on a GPU: nothing is computed until new ones are loaded.
Sampled tokens of sequences are kept, and their prompts are recomputed.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.plugins.engine.generation.kv_cache import KVCache, PrefixStore
from agentrl.plugins.engine.generation.model_caches import ModelCaches
from agentrl.runtime.processes.memory import return_freed_memory

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
_ALL = (KV_CACHE, WEIGHTS, CUDA_GRAPH)
"""Tags that an empty list stands for."""


class MemorySaver:
    """Tracks which parts of the engine's memory are allocated, in the scheduler's thread only."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache | ModelCaches,
        prefixes: PrefixStore,
        forget_graphs: Callable[[], None],
    ) -> None:
        self._model = model
        self._kv = kv
        self._prefixes = prefixes
        self._forget_graphs = forget_graphs
        self._released: set[str] = set()
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self._uninitialized: set[int] = set()
        """Addresses of the parameters that were allocated again but not loaded yet."""

    @property
    def is_whole(self) -> bool:
        """Whether all memory that computing needs is allocated."""
        return not (self._released & {WEIGHTS, KV_CACHE} or self._uninitialized)

    def check_weights(self) -> None:
        """Raise an `InferenceError` while the memory of the weights is released."""
        if WEIGHTS in self._released:
            raise InferenceError(
                "the weights' memory is released; resume it before loading weights"
            )

    def release(self, tags: Sequence[str]) -> None:
        """Release parts of the memory, or all; what is already released stays so."""
        requested = set(tags or _ALL) - self._released
        if requested:
            self._forget_graphs()
        if KV_CACHE in requested:
            self._kv.release()
            self._prefixes.clear()
        if WEIGHTS in requested:
            for parameter in self._model.parameters():
                self._shapes[parameter] = parameter.shape
                parameter.data = parameter.data.new_empty(0)
            self._uninitialized.clear()
        self._released |= requested
        return_freed_memory()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate memory again.

        Raises `InferenceError` if one of them was not released; nothing has changed then.
        """
        requested = set(tags or _ALL)
        if not_released := sorted(requested - self._released):
            raise InferenceError(f"the memory of {', '.join(not_released)} was not released")
        if WEIGHTS in requested:
            for parameter, shape in self._shapes.items():
                parameter.data = parameter.data.new_empty(shape)
                self._uninitialized.add(parameter.data_ptr())
            self._shapes.clear()
        self._released -= requested

    def note_loaded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that parameters have values now."""
        self._uninitialized -= {tensor.data_ptr() for tensor in tensors}

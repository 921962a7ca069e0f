"""Decode steps of fixed shapes on a GPU: recorded once as CUDA graphs, then replayed.

A decode step of a small model consists of hundreds of kernels that each take less time than Python
needs to start it. A graph starts all of them at once, but with the shapes and addresses that it was
recorded with: the numbers of rows and of positions are rounded up to powers of two, the rows in
excess decode a token of their own whose logits nobody reads, and all that changes from step to step
is copied into one tensor, from which the recorded kernels compute the rest.

Shape legend: B rows of the graph, K key-value heads, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.models.attention.backend import CONTEXT
from agentrl.plugins.engine.generation.cached_attention import StepPlan
from agentrl.plugins.engine.generation.kv_cache import KVCache

_SHORTEST = 256
"""Positions of the smallest graph."""


class DecodeStep:
    """A decode step of fixed shapes.

    The cache is [L, 2, R, K, T, D], with at least `num_rows` (B) rows of `length` positions.
    """

    def __init__(
        self, model: PreTrainedModel, cache: torch.Tensor, num_rows: int, length: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._length = length
        self._inputs = torch.zeros(2, num_rows, dtype=torch.int64, device=cache.device)
        """Tokens and their positions."""

    def set_inputs(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the token that each of the leading rows decodes; the others decode one at 0."""
        inputs = np.zeros(self._inputs.shape, dtype=np.int64)
        inputs[:, : len(tokens)] = tokens, positions
        self._inputs.copy_(torch.from_numpy(inputs))

    def compute(self) -> torch.Tensor:
        """Return the logits [B, V]; nothing in it depends on values that the host would know."""
        tokens, positions = self._inputs
        num_rows, num_heads, room = len(tokens), *self._cache.shape[3:5]
        device = self._cache.device
        heads = torch.arange(num_rows * num_heads, device=device).view(num_rows, num_heads)
        past_end = torch.arange(self._length, device=device) > positions[:, None]
        bias = torch.zeros(past_end.shape, dtype=self._cache.dtype, device=device)
        plan = StepPlan(
            cache=self._cache,
            slots=(heads * room + positions[:, None]).view(-1),
            num_decoding=num_rows,
            decode_length=self._length,
            decode_bias=bias.masked_fill(past_end, float("-inf"))[:, None, None],
            shared=None,
            chunks=(),
            chunk_masks=(),
        )
        logits: torch.Tensor = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            **{CONTEXT: plan},
        ).logits[0]
        return logits


class DecodeGraphs:
    """The recorded steps of a model on a GPU, by their shapes."""

    def __init__(self, model: PreTrainedModel, kv: KVCache) -> None:
        self._model = model
        self._kv = kv
        self._cache = kv.tensor
        self._recorded: dict[tuple[int, int], _RecordedStep] = {}

    def forward(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the logits [rows, V] of a token in each of the leading rows of the cache."""
        if self._cache is not self._kv.tensor:
            self.forget()
            self._cache = self._kv.tensor
        shape = graph_shape(self._cache, len(tokens), max(positions) + 1)
        if shape not in self._recorded:
            self._recorded[shape] = _RecordedStep(DecodeStep(self._model, self._cache, *shape))
        return self._recorded[shape].replay(tokens, positions)[: len(tokens)]

    def forget(self) -> None:
        """Drop the graphs, because memory that they name is released."""
        self._recorded.clear()


def graph_shape(cache: torch.Tensor, num_rows: int, length: int) -> tuple[int, int]:
    """Return the rows and positions of the graph for a step: powers of two, or the whole cache."""
    _, _, rows, _, room, _ = cache.shape
    rounded = 1 << (num_rows - 1).bit_length()
    return min(rounded, rows), min(max(_SHORTEST, 1 << (length - 1).bit_length()), room)


class _RecordedStep:
    """A decode step as a CUDA graph."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        # Libraries allocate their workspaces in a first pass, which must not be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads copy weights and adapters meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step.compute()

    def replay(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the logits, which the next replay overwrites."""
        self._step.set_inputs(tokens, positions)
        self._graph.replay()
        return self._logits

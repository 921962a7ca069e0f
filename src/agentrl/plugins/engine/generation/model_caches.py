"""Sequences in the caches that transformers creates for a model, one cache per sequence.

For models whose layers keep something other than plain keys and values of every token: windows,
recurrent states, latent heads, layers that share keys. Each sequence of a step is a separate
forward pass, so the engine serves every family that transformers runs, at the cost of batching.

A recurrent state cannot be rolled back to an earlier token. The cache of an ended sequence is
therefore kept as it is, and a new sequence continues it if it starts with all of its tokens, as the
next turn of a conversation does.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import softplus
from transformers import DynamicCache, PreTrainedModel

from agentrl.data.shown_images import RowImages
from agentrl.models.vision.image_encoders import kind_keywords, shown_features
from agentrl.models.vision.image_reader import ImageReader
from agentrl.plugins.engine.generation.cached_attention import Chunk
from agentrl.plugins.engine.generation.kv_cache import RowLimits
from agentrl.plugins.engine.generation.model_runner import score_prompt
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.weights.lora_adapters import AdapterLayers

_STATE_UPDATE = "mamba2_selective_state_update"
"""The function in modeling files that computes a single token."""


class KeptCache:
    """The cache of an ended sequence, as a `PrefixStore` keeps it."""

    def __init__(self, cache: DynamicCache) -> None:
        self._cache = cache

    def clone(self) -> "KeptCache":
        """Return the object itself, because the cache of an ended sequence is never written to."""
        return self

    def continued(self) -> DynamicCache:
        """Return a copy for a sequence that continues from here."""
        continued: DynamicCache = copy.deepcopy(self._cache)
        return continued


class ModelCaches:
    """The caches of running sequences by their rows; has the interface of `KVCache`."""

    can_be_cut = False

    def __init__(self, model: PreTrainedModel, limits: RowLimits) -> None:
        self._config = model.config
        self._limits = limits
        self._rows: dict[int, DynamicCache] = {}

    def ensure(self, num_rows: int, length: int) -> bool:
        """Return whether this many rows of this length fit."""
        return self._limits.fit(num_rows, length)

    def release(self) -> None:
        """Release the memory."""
        self._rows.clear()

    def start(self, row: int) -> None:
        """Give a row an empty cache."""
        self._rows[row] = DynamicCache(config=self._config)

    def fill(self, row: int, prefix: KeptCache, _length: int) -> None:
        """Continue the cache of an ended sequence in a row."""
        self._rows[row] = prefix.continued()

    def move(self, source: int, target: int, _length: int) -> None:
        """Move a sequence to another row."""
        self._rows[target] = self._rows.pop(source)

    def prefix(self, row: int, _length: int) -> KeptCache:
        """Return the cache of a sequence that leaves its row."""
        return KeptCache(self._rows[row])

    def of(self, row: int) -> DynamicCache:
        """Return the cache of a row."""
        return self._rows[row]


class ModelCacheRunner:
    """Runs a model over `ModelCaches`; has the interface of `ModelRunner`."""

    def __init__(self, model: PreTrainedModel, caches: ModelCaches) -> None:
        _clamp_time_steps(model)
        self._model = model
        self._reader = ImageReader(model.config)
        self._caches = caches
        self._adapters = AdapterLayers(model)
        self.num_prefilled = 0
        """Prompt tokens that were computed, so far."""

    def forget_graphs(self) -> None:
        """Do nothing, because these models run without graphs."""

    def room_for_experts(self, _num_tokens: int) -> np.ndarray | None:
        """Return None, because the routers of these families are not recorded."""
        return None

    def forward(
        self, running: Sequence[TokenSequence], num_decoding: int, chunks: Sequence[Chunk]
    ) -> tuple[torch.Tensor, list[TokenSequence]]:
        """Compute a step, see `ModelRunner.forward`."""
        logits, sampled = [], []
        decoding = [
            Chunk(row, sequence.length - 1, sequence.length)
            for row, sequence in enumerate(running[:num_decoding])
        ]
        for chunk in (*decoding, *chunks):
            sequence = running[chunk.row]
            chunk_logits = self._compute(sequence, chunk)
            if chunk.row >= num_decoding:
                self.num_prefilled += chunk.size
                if sequence.prompt_logprobs_from >= 0:
                    score_prompt(sequence, chunk, chunk_logits)
            sequence.num_computed = chunk.end
            if chunk.end == sequence.length:
                logits.append(chunk_logits[-1])
                sampled.append(sequence)
        return torch.stack(logits) if logits else torch.empty(0), sampled

    def _compute(self, sequence: TokenSequence, chunk: Chunk) -> torch.Tensor:
        """Return the logits [size or 1, V] of a sequence's next tokens."""
        self._adapters.choose([sequence.adapter] * chunk.size)
        tokens = sequence.tokens[chunk.start : chunk.end].astype(np.int64)
        positions = sequence.positions(chunk.start, chunk.end)
        logits: torch.Tensor = self._model(
            input_ids=torch.as_tensor(tokens)[None],
            position_ids=torch.as_tensor(np.ascontiguousarray(positions)),
            past_key_values=self._caches.of(chunk.row),
            use_cache=True,
            logits_to_keep=0 if sequence.prompt_logprobs_from >= 0 else 1,
            **self._images(sequence, chunk),
        ).logits[0]
        return logits

    def _images(self, sequence: TokenSequence, chunk: Chunk) -> dict[str, Any]:
        """Return the keywords that pass the images of a chunk, each whole, to the model."""
        shown = RowImages.of(
            [
                (placed.start - chunk.start, placed.image)
                for placed in sequence.images
                if chunk.start <= placed.start < chunk.end
            ]
        )
        if shown is None:
            return {}
        # Masks cover the sequence from its start.
        all_shown = RowImages.of(
            [(placed.start, placed.image) for placed in sequence.images if placed.start < chunk.end]
        )
        assert all_shown is not None, "the images of the chunk are included"
        return shown_features(self._model, self._reader, shown) | kind_keywords(
            self._model, all_shown, chunk.end
        )


def _clamp_time_steps(model: PreTrainedModel) -> None:
    """Clamp the time steps of Mamba-2 layers in decoding as in prefilling and training.

    transformers clamps them only in its scan of many tokens; without this, sampled tokens would get
    other logprobs than the trainer computes.
    """
    for mixer in model.modules():
        limit = getattr(mixer, "time_step_limit", None)
        module: Any = sys.modules[type(mixer).__module__]
        update = getattr(module, _STATE_UPDATE, None)
        if limit is None or update is None or hasattr(update, "is_limited"):
            continue

        def clamped_update(
            *arguments: Any, limit: Any = limit, update: Any = update, **keywords: Any
        ) -> Any:
            state, x, dt, *others = arguments
            bias = keywords.pop("dt_bias", None)
            dt = dt if bias is None else dt + bias
            if keywords.pop("dt_softplus", False):
                dt = softplus(dt)
            return update(state, x, dt.clamp(*limit), *others, **keywords)

        clamped_update.is_limited = True  # type: ignore[attr-defined]
        setattr(module, _STATE_UPDATE, clamped_update)

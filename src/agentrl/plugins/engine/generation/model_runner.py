"""Loads the model to serve; `ModelRunner` runs one step's forward pass over it.

A step computes decoding sequences and chunks of prompts together.

Input: sequences with rows in the cache. Output: logits; the sequences record the computed tokens,
prompt logprobs, and the experts of a mixture-of-experts model. Independent of queues.

Shape legend: N tokens of a step, B sequences that get a token, V vocabulary, L layers, K experts
per token, W = L * K.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import own_attention, set_attention
from agentrl.models.attention.backend import CONTEXT
from agentrl.models.checkpoints.architectures import has_plain_layers, raw_config
from agentrl.models.vision.image_encoders import model_class
from agentrl.plugins.engine.generation.cached_attention import ENGINE_ATTENTION, Chunk, plan_step
from agentrl.plugins.engine.generation.decode_graphs import DecodeGraphs
from agentrl.plugins.engine.generation.kv_cache import KVCache
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.weights.live_weights import check_checkpoint, first_line
from agentrl.plugins.engine.weights.lora_adapters import AdapterLayers

logger = logging.getLogger(__name__)


def load_model(
    path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a model for generation."""
    if not Path(path).is_dir():
        raise ConfigError(f"--model-path {path}: no such directory")
    disable_progress_bar: Callable[[], None] = transformers_logging.disable_progress_bar
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path {path}: {first_line(error)}") from error
    raw_config(Path(path))
    check_checkpoint(path, config, dtype)
    has_kv_rows = has_plain_layers(config)
    try:
        model: PreTrainedModel = model_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ENGINE_ATTENTION if has_kv_rows else None,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--model-path {path}: {first_line(error)}") from error
    if not has_kv_rows:
        set_attention(model, own_attention(model))
        logger.info(
            "%s models keep more state than keys and values: sequences are computed one by one, "
            "and a prefix is reused only where it ends a turn",
            config.model_type,
        )
    placed: PreTrainedModel = model.to(device)  # type: ignore[arg-type]  # narrowed there
    return placed


class ModelRunner:
    """Runs a model over the rows of a cache."""

    def __init__(self, model: PreTrainedModel, kv: KVCache) -> None:
        self._model = model
        self._kv = kv
        self._adapters = AdapterLayers(model)
        self._router_capture = RouterCapture.of(model)
        # Experts are chosen, and their tokens counted, on the host.
        has_graphs = model.device.type == "cuda" and self._router_capture is None
        self._graphs = DecodeGraphs(model, kv) if has_graphs else None
        self.num_prefilled = 0
        """Prompt tokens computed so far."""

    def forget_graphs(self) -> None:
        """Drop what was recorded with the addresses of memory that is released."""
        if self._graphs is not None:
            self._graphs.forget()

    def room_for_experts(self, num_tokens: int) -> np.ndarray | None:
        """Return an array for the experts of a sequence's tokens; None for a dense model."""
        capture = self._router_capture
        return None if capture is None else capture.room_for(num_tokens)

    # Several percent faster than `no_grad` when a step consists of many small operations. It
    # creates inference tensors, none of which may outlive the step; the cache's memory was
    # allocated before.
    @torch.inference_mode()
    def forward(
        self, running: Sequence[TokenSequence], num_decoding: int, chunks: Sequence[Chunk]
    ) -> tuple[torch.Tensor, list[TokenSequence]]:
        """Compute a step: one token of each decoding sequence, and chunks of prompts.

        `running` has the order of the cache rows; the first `num_decoding` decode, and `chunks` are
        parts of the prompts of the others. Returns logits [B, V] of the sequences that get a token,
        and these sequences.
        """
        decoding = running[:num_decoding]
        input_ids = [int(sequence.tokens[sequence.length - 1]) for sequence in decoding]
        positions = [sequence.length - 1 for sequence in decoding]
        adapters = [sequence.adapter for sequence in decoding]
        if self._graphs is not None and not chunks and not any(adapters):
            self._adapters.choose(adapters)
            for sequence in decoding:
                sequence.num_computed = sequence.length
            return self._graphs.forward(input_ids, positions), list(decoding)
        plan = plan_step(self._kv, decoding, chunks)
        sampled_rows = list(range(len(decoding)))
        sampled = list(decoding)
        scored: list[tuple[TokenSequence, Chunk, int]] = []
        for chunk in chunks:
            sequence = running[chunk.row]
            offset = len(input_ids)
            input_ids += sequence.tokens[chunk.start : chunk.end].tolist()
            positions += range(chunk.start, chunk.end)
            adapters += [sequence.adapter] * chunk.size
            sequence.num_computed = chunk.end
            self.num_prefilled += chunk.end - chunk.start
            if sequence.prompt_logprobs_from >= 0:
                scored.append((sequence, chunk, offset))
            if chunk.end == sequence.length:
                sampled_rows.append(len(input_ids) - 1)
                sampled.append(sequence)
        for sequence in decoding:
            sequence.num_computed = sequence.length
        # The logits of all positions are needed only for prompt logprobs.
        keep = (
            torch.arange(len(input_ids))
            if scored
            else torch.tensor(sampled_rows, dtype=torch.int64)
        )
        self._adapters.choose(adapters)
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor([input_ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=keep,
            **{CONTEXT: plan},
        ).logits[0]
        if self._router_capture is not None:
            owners = [(sequence, sequence.length - 1, sequence.length) for sequence in decoding]
            owners += [(running[chunk.row], chunk.start, chunk.end) for chunk in chunks]
            self._router_capture.note(owners)
        for sequence, chunk, offset in scored:
            score_prompt(sequence, chunk, logits[offset : offset + chunk.end - chunk.start])
        return (logits[sampled_rows] if scored else logits), sampled


class RouterCapture:
    """Records the experts to which a mixture-of-experts model routes tokens.

    Shape legend: N tokens of a step, L layers, K experts a token, W = L * K.
    """

    def __init__(self, layers: Sequence[Any], num_chosen: int) -> None:
        """Hook the routers of these decoder layers; layers without a router record 0."""
        self._num_layers = len(layers)
        self._num_chosen = num_chosen
        self._last_choices: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._recording_hook(number))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Return a capture, or None for a model without experts."""
        config, base = model.config, model.base_model
        num_chosen = getattr(config, "num_experts_per_tok", None)
        return None if num_chosen is None else cls(base.layers, num_chosen)  # type: ignore[arg-type]

    def room_for(self, num_tokens: int) -> np.ndarray:
        """Return an array for the choices of a sequence's tokens, int16 [num_tokens, W]."""
        return np.zeros((num_tokens, self._num_layers * self._num_chosen), dtype=np.int16)

    def note(self, owners: Sequence[tuple[TokenSequence, int, int]]) -> None:
        """Record the choices of the last step.

        The owners are sequences, first positions and ends of the step's tokens, in order.
        """
        num_tokens = sum(end - start for _, start, end in owners)
        choices = np.zeros((num_tokens, self._num_layers, self._num_chosen), dtype=np.int16)
        for number, chosen in self._last_choices.items():
            choices[:, number] = chosen.cpu().numpy()
        rows = choices.reshape(num_tokens, -1)
        offset = 0
        for sequence, start, end in owners:
            assert sequence.routed_experts is not None, (
                "every sequence of such a model has an array for them"
            )
            sequence.routed_experts[start:end] = rows[offset : offset + end - start]
            offset += end - start

    def _recording_hook(self, number: int) -> Any:
        def record(_module: object, _arguments: object, output: tuple[torch.Tensor, ...]) -> None:
            self._last_choices[number] = output[2]

        return record


def score_prompt(sequence: TokenSequence, chunk: Chunk, logits: torch.Tensor) -> None:
    """Record the logprobs of the prompt tokens that the logits [chunk, V] of a chunk predict."""
    first = max(chunk.start, sequence.prompt_logprobs_from)
    last = min(chunk.end, sequence.num_prompt - 1)
    if first >= last or len(sequence.prompt_logprobs) >= last - sequence.prompt_logprobs_from:
        return
    logprobs = torch.log_softmax(logits[first - chunk.start : last - chunk.start].float(), dim=-1)
    targets = torch.as_tensor(sequence.tokens[first + 1 : last + 1].astype("int64"))
    sequence.prompt_logprobs += logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()

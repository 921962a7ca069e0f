"""The registered attention back ends; each is a module in this folder and an entry in `BACKENDS`.

The model's loader selects a back end by name; the forward pass asks here for the keywords that carry
a row's layout to the layers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.data.rows import PackedRow
from agentrl.errors import ConfigError
from agentrl.models.attention.automatic import AUTOMATIC
from agentrl.models.attention.backend import CONTEXT, AttentionBackend, RowContext
from agentrl.models.attention.flex import FLEX
from agentrl.models.attention.sdpa import SDPA
from agentrl.models.attention.varlen import VARLEN
from agentrl.models.rows.chunk_states import ChunkStates
from agentrl.models.rows.row_split import RowShare
from agentrl.models.vision.image_encoders import reads_images
from agentrl.models.vision.image_reader import sees_images_whole

BACKENDS: tuple[AttentionBackend, ...] = (AUTOMATIC, SDPA, FLEX, VARLEN)
"""The first is the default."""
TREE_ATTENTION = AUTOMATIC.implementation

_BY_FLAG = {backend.flag: backend for backend in BACKENDS}
_BY_IMPLEMENTATION = {backend.implementation: backend for backend in BACKENDS}


def implementation_of(flag: str) -> str:
    """Return transformers' name for a value of `--attention_implementation`."""
    return _BY_FLAG[flag].implementation


def check_device(implementation: str, device: torch.device) -> None:
    """Check that a back end can train on a device.

    Raises:
        ConfigError: it cannot; the message names one that can.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    refusal = None if backend is None else backend.refusal(device)
    if backend is not None and refusal is not None:
        raise ConfigError(
            f"--attention_implementation {backend.flag} {refusal}; use {AUTOMATIC.flag}, which computes the "
            "same on every device"
        )


def check_images(implementation: str, config: PretrainedConfig) -> None:
    """Check that a back end computes a model's attention within images.

    Raises:
        ConfigError: it supports only paths; the message names one that supports images.
    """
    if implementation in (FLEX.implementation, VARLEN.implementation) and sees_images_whole(config):
        raise ConfigError(
            f"--attention_implementation {_BY_IMPLEMENTATION[implementation].flag}: the tokens of an "
            f"image attend to one another in {config.model_type} models; use {AUTOMATIC.flag}"
        )


def own_attention(model: PreTrainedModel) -> str:
    """Return transformers' name for the attention that a model has without ours."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and softcap is None else "eager"


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Select the attention of a model's decoder; an image encoder keeps its own.

    FlexAttention does not compute float64, so the default is SDPA for such models.
    """
    if implementation == AUTOMATIC.implementation and model.dtype == torch.float64:
        implementation = SDPA.implementation
    if reads_images(model.config):
        model.set_attn_implementation(
            {"text_config": implementation, "vision_config": own_attention(model)}
        )
    else:
        model.set_attn_implementation(implementation)


def attention_of(model: PreTrainedModel) -> str:
    """Return transformers' name of the attention of a model's decoder."""
    implementation: str = model.config.get_text_config()._attn_implementation
    return implementation


@contextmanager
def with_own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give a model its own attention within the block; backward passes belong inside as well.

    Rows are then single turns. The result is the reference for merged training, because it involves
    no code for token trees.
    """
    implementation = attention_of(model)
    set_attention(model, own_attention(model))
    try:
        yield
    finally:
        set_attention(model, implementation)


def computes_trees(model: PreTrainedModel) -> bool:
    """Return whether a model's attention is one of our back ends."""
    return attention_of(model) in _BY_IMPLEMENTATION


def layer_keywords(
    implementation: str,
    row: PackedRow,
    device: torch.device,
    share: RowShare,
    states: ChunkStates | None = None,
    *,
    traced_windows: Iterable[int | None] = (),
) -> dict[str, Any]:
    """Return the keywords of a model's forward pass that describe a row to its layers.

    Args:
        implementation: transformers' name of the model's attention; any other than ours leaves the
            layers unchanged, and the row must be a single turn.
        row: N tokens in depth-first preorder.
        device: where the model computes.
        share: this rank's part of the row.
        states: what the row shares with earlier chunks; None for a whole row.
        traced_windows: windows of compiled layers.
    """
    backend = _BY_IMPLEMENTATION.get(implementation)
    if backend is not None:
        context = RowContext(backend, row, device, share, states)
        context.lay_out(traced_windows)
        return {CONTEXT: context}
    assert row.is_single_path, "the model's own attention computes one turn a row"
    assert states is None, "the model's own attention computes whole rows"
    return {}

"""Models that read images, and the image inputs of their forward pass.

Each image is encoded once per row, however often the row shows it; its features are then used in
every place. The model's own forward pass inserts them among its embeddings. A trained encoder gets
its gradient from all places.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from agentrl.data.shown_images import RowImages, ShownImage
from agentrl.models.vision.image_reader import ImageReader

_KIND_NAMES = ("token_type_ids", "mm_token_type_ids")
"""Keywords that tell families which tokens are text (0) and which are images (1)."""


def reads_images(config: PretrainedConfig) -> bool:
    """Return whether a model has an image encoder."""
    return getattr(config, "vision_config", None) is not None


def model_class(config: PretrainedConfig) -> Any:
    """Return the class with which transformers creates and loads a model with a language head."""
    is_mapped = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_mapped else AutoModelForCausalLM


def freeze_encoder(model: PreTrainedModel) -> None:
    """Freeze the parameters that only images pass through; none in a text-only model."""
    if not reads_images(model.config):
        return
    base: Any = model.base_model
    text = {id(parameter) for parameter in base.language_model.parameters()}
    for parameter in base.parameters():
        if id(parameter) not in text:
            parameter.requires_grad = False


def shown_features(
    model: PreTrainedModel, reader: ImageReader, images: RowImages, stretch: slice | None = None
) -> dict[str, Any]:
    """Return the keyword of a model's forward pass that holds the encoded images.

    Args:
        model: whose encoder it is.
        reader: of its images.
        images: of the whole row.
        stretch: tokens of the row that this rank computes; None: all.
    """
    features = _encode(model, reader, images.images)
    features.pooler_output = _per_shown_image(features.pooler_output, images, stretch)
    if getattr(features, "deepstack_features", None) is not None:
        features.deepstack_features = [
            _per_shown_image(part, images, stretch) for part in features.deepstack_features
        ]
    return {"mm_encoder_outputs": {"image": features}}


def unshown_features(
    model: PreTrainedModel, reader: ImageReader, image: ShownImage
) -> torch.Tensor:
    """Encode an image without showing it: the result is 0 but depends on the whole encoder."""
    features = _encode(model, reader, [image])
    made = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    total = torch.stack([part.sum() for parts in made for part in parts]).sum()
    return total * 0.0


def kind_keywords(model: PreTrainedModel, images: RowImages, num_tokens: int) -> dict[str, Any]:
    """Return the input of a model's own masks: which of its tokens are images."""
    device = next(model.parameters()).device
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    for start, end in images.spans.tolist():
        kinds[:, start:end] = 1
    parameters = inspect.signature(model.base_model.forward).parameters
    return {name: kinds for name in _KIND_NAMES if name in parameters}


def grid_keywords(model: PreTrainedModel, reader: ImageReader, images: RowImages) -> dict[str, Any]:
    """Return the input of a model's own positions if it counts rows and columns."""
    grids = reader.inputs(images.images)["image_grid_thw"]
    return {"image_grid_thw": grids[images.which.tolist()].to(next(model.parameters()).device)}


def _encode(model: PreTrainedModel, reader: ImageReader, images: Sequence[ShownImage]) -> Any:
    base: Any = model.base_model
    device = next(model.parameters()).device
    pixels = {name: part.to(device) for name, part in reader.inputs(images).items()}
    pixels["pixel_values"] = pixels["pixel_values"].to(model.dtype)
    return base.get_image_features(**pixels, return_dict=True)


def _per_shown_image(parts: Any, images: RowImages, stretch: slice | None) -> Any:
    """Return the features of each shown image, from those of each encoded image."""
    order = images.which.tolist()
    is_stacked = isinstance(parts, torch.Tensor)
    if stretch is None:
        return parts[order] if is_stacked else tuple(parts[number] for number in order)
    shown = []
    for number, (start, end) in zip(order, images.spans.tolist(), strict=True):
        first, last = (min(max(edge, start), end) for edge in (stretch.start, stretch.stop))
        shown.append(parts[number][first - start : last - start])
    return torch.cat(shown) if is_stacked else tuple(shown)

"""Tiny random models that read images, and a few images."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PillowImage
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from agentrl.data.shown_images import ShownImage
from agentrl.models.vision.image_reader import ImageReader
from harness.tiny_families import DELTA, SHAPE, randomized
from harness.tiny_tokenizer import SEEING, write_seeing_tokenizer

TEXT_VOCABULARY = 40
"""Number of text ids; those of images follow."""
_IDS = dict(zip(("image", "video", "start", "end", "audio"), range(40, 45), strict=True))
_TEXT: dict[str, Any] = {**SHAPE, "vocab_size": 48}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**_ROPE, "mrope_interleaved": True}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": _IDS["image"],
    "video_token_id": _IDS["video"],
    "vision_start_token_id": _IDS["start"],
    "vision_end_token_id": _IDS["end"],
}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
_DELTA = {**DELTA, "layer_types": ["linear_attention", "full_attention"]}
_WINDOWED = {
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_DEEP = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

Family = tuple[dict[str, Any], dict[str, Any]]
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def _qwen(text: dict[str, Any], tower: dict[str, Any]) -> Family:
    configs = {"text_config": {**_TEXT, **text}, "vision_config": {**_TOWER, **tower}}
    return {**configs, **_QWEN_TOKENS}, _QWEN_PROCESSOR


_QWEN3 = {"head_dim": 16, "rope_parameters": _INTERLEAVED}
_PARTIAL = {**_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
VISION_FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": _qwen(
        {"rope_parameters": _ROPE}, {"window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": _qwen(_QWEN3, _DEEP),
    "qwen3_vl_moe": _qwen({**_EXPERTS, **_QWEN3}, _DEEP),
    "qwen3_5": _qwen(
        {**_DELTA, "head_dim": 16, "rope_parameters": _PARTIAL}, {"num_position_embeddings": 64}
    ),
    "qwen3_5_moe": _qwen(
        {
            **_DELTA,
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "head_dim": 16,
            "rope_parameters": _PARTIAL,
        },
        {"num_position_embeddings": 64},
    ),
    "gemma3": (
        {
            "text_config": {**_TEXT, **_WINDOWED, "query_pre_attn_scalar": 16},
            "vision_config": {"model_type": "siglip_vision_model", **_SIGHT, "image_size": 16},
            "mm_tokens_per_image": 4,
            "image_token_index": _IDS["image"],
            "boi_token_index": _IDS["start"],
            "eoi_token_index": _IDS["end"],
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    ),
    # Its images are longer than its window.
    "gemma4": (
        {
            "text_config": {
                **_TEXT,
                **_WINDOWED,
                "vocab_size_per_layer_input": 48,
                "hidden_size_per_layer_input": 8,
                "pad_token_id": 0,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                **_SIGHT,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "pooling_kernel_size": 3,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "image_token_id": _IDS["image"],
            "boi_token_id": _IDS["start"],
            "eoi_token_id": _IDS["end"],
            "video_token_id": _IDS["video"],
            "audio_token_id": _IDS["audio"],
        },
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70,
        },
    ),
}
"""Values for transformers' configuration of a model type, and image processor settings."""


def vision_config(family: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a family's tiny model."""
    values = json.loads(json.dumps({**VISION_FAMILIES[family][0], **changes}))
    config: PretrainedConfig = AutoConfig.for_model(family, **values)
    return config


def vision_model(
    family: str, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A random model of a family."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        vision_config(family, **changes), dtype=torch.float32
    )
    randomized(model).to(dtype=dtype)  # type: ignore[call-arg]
    return model


def picture(seed: int, width: int = 16, height: int = 16, kind: str = "PNG") -> bytes:
    """An image file of random pixels."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = BytesIO()
    PillowImage.fromarray(pixels).save(written, format=kind)
    return written.getvalue()


def shown_pictures(family: str) -> list[ShownImage]:
    """Three images of different sizes, as a family reads them; two take as many positions."""
    reader = ImageReader(vision_config(family))
    files = [picture(1), picture(2), picture(3, 40, 16)]
    return [reader.shown(file, VISION_FAMILIES[family][1]) for file in files]


_GEMMA_TEMPLATE = SEEING.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")


def vision_checkpoint(folder: Path, family: str) -> Path:
    """A random model of a family with a tokenizer of bytes and a template that shows images."""
    template = _GEMMA_TEMPLATE if family == "gemma3" else SEEING
    write_seeing_tokenizer(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = {
        _IDS["image"]: "<|image_pad|>",
        _IDS["start"]: "<|vision_start|>",
        _IDS["end"]: "<|vision_end|>",
        _IDS["video"]: "<tool_call>",  # videos are not used
    }
    own = VISION_FAMILIES[family][0]
    ids = {
        name: tokenizer.token_to_id(marks[value])
        for name, value in own.items()
        if isinstance(value, int) and value in marks
    }
    text = {**own["text_config"], "vocab_size": tokenizer.get_vocab_size()}
    model = vision_model(family, torch.float32, **ids, text_config=text)
    model.save_pretrained(folder)
    settings = json.dumps(VISION_FAMILIES[family][1])
    (folder / "preprocessor_config.json").write_text(settings)
    return folder

"""Builds a small random model with the structure of a large one, to test its layers.

Input: a configuration. Output: a model with one layer of each kind, whose widths, windows and
vocabulary are small enough to run in milliseconds. Settings that define the computation of layers
(activations, scales, caps, patterns of layers, width of convolutions) stay unchanged.
"""

from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.models.vision.image_encoders import model_class, reads_images

_HEAD_SIZE = 16
_MAX_VALUES: dict[str, int] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "head_dim": _HEAD_SIZE,
    "global_head_dim": _HEAD_SIZE,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "linear_key_head_dim": _HEAD_SIZE,
    "linear_value_head_dim": _HEAD_SIZE,
    "linear_head_dim": _HEAD_SIZE,
    "linear_num_heads": 2,
    "mamba_d_head": _HEAD_SIZE,
    "mamba_head_dim": _HEAD_SIZE,
    "mamba_num_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "sliding_window": 7,
    "attention_chunk_size": 7,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
}
"""Largest values in a small copy, by their names in configurations."""
_MAX_VISION_VALUES = {
    "depth": 3,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 4,
    "image_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "num_position_embeddings": 64,
    "position_embedding_size": 64,
}
"""The same for image encoders."""
_FEW_BLOCKS = (("deepstack_visual_indexes", [0]), ("fullatt_block_indexes", [1]))
_NUM_IMAGE_TOKENS = 16
_HEAD_PAIRS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)
"""Numbers of heads whose ratio is the number of heads that share one: each becomes at most 2."""


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a small model with a layer of each kind.

    Raises:
        Exception: the family's configuration class refuses the values; it may be third-party code.
    """
    if config.get_text_config() is not config:
        return _small_composite(config)
    values = _small_values(config.to_dict())
    copy: PretrainedConfig = type(config).from_dict(values)
    return copy


def small_image_processor(config: PretrainedConfig) -> dict[str, Any]:
    """Return settings for the family's image processor to read images for a small copy."""
    vision: Any = config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "size": {"shortest_edge": 64, "longest_edge": 1024},
        }
    if hasattr(vision, "pooling_kernel_size"):
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": vision.patch_size,
            "pooling_kernel_size": vision.pooling_kernel_size,
            "max_soft_tokens": 70,
        }
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": vision.image_size, "width": vision.image_size},
    }


def _small_composite(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of all parts; the image's own tokens are the last of the vocabulary."""
    values: dict[str, Any] = config.to_dict()
    text = _small_values(config.get_text_config().to_dict())
    rope = text.get("rope_parameters") or {}
    if "mrope_section" in rope:
        size = int(text.get("head_dim", _HEAD_SIZE) * rope.get("partial_rotary_factor", 1.0)) // 2
        edges = np.cumsum([0, *rope["mrope_section"]])
        sections = np.diff(np.round(edges * size / edges[-1])).astype(int).tolist()
        text["rope_parameters"] = {**rope, "mrope_section": sections}
    values["text_config"] = text | {"pad_token_id": 0}  # some families use the image token's id
    if reads_images(config):
        values["vision_config"] = _small_encoder(values["vision_config"], text["hidden_size"])
    for name, value in (("mm_tokens_per_image", 4), ("audio_config", None)):
        if name in values:
            values[name] = value
    names = [name for name in values if name.endswith(("_token_id", "_token_index"))]
    for number, name in enumerate(names):
        values[name] = text["vocab_size"] - 1 - number
    copy: PretrainedConfig = type(config).from_dict(values)
    return copy


def _small_encoder(values: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    bounded = {
        name: min(value, _MAX_VISION_VALUES.get(name, value)) if isinstance(value, int) else value
        for name, value in values.items()
    }
    for name, value in (("out_hidden_size", hidden_size), *_FEW_BLOCKS):
        if name in bounded:
            bounded[name] = value
    return bounded


def text_vocabulary(config: PretrainedConfig) -> int:
    """Return the number of a small copy's tokens that do not stand for images."""
    size: int = config.get_text_config().vocab_size
    return size - _NUM_IMAGE_TOKENS if reads_images(config) else size


def _small_values(values: dict[str, Any]) -> dict[str, Any]:
    values = _bounded(values)
    for few, many in _HEAD_PAIRS:
        if isinstance(values.get(many), int):
            ratio = values[many] // (values.get(few) or values[many])
            values[few] = min(values.get(few) or values[many], 2)
            values[many] = values[few] * min(ratio, 2)
    values["hidden_size"] = 4 * _HEAD_SIZE
    if "head_dim" in values:
        values["head_dim"] = _HEAD_SIZE
    else:
        values["hidden_size"] = values["num_attention_heads"] * _HEAD_SIZE
    if values.get("kv_lora_rank"):  # such families give the rotary part as the head size
        values["head_dim"] = values["qk_rope_head_dim"]
    if "mamba_n_heads" in values:
        width = values.get("mamba_expand", 1) * values["hidden_size"]
        values["mamba_n_heads"] = width // values["mamba_d_head"]
        if values.get("mamba_d_ssm"):
            values["mamba_d_ssm"] = width
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = None
    return values | _few_layers(values)


def _bounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return values limited to `_AT_MOST`, including those of single layers."""
    bounded = dict(values)
    for name, value in values.items():
        if name in _MAX_VALUES and isinstance(value, int):
            bounded[name] = min(value, _MAX_VALUES[name])
    layers = values.get("per_layer_config")
    if layers:
        bounded["per_layer_config"] = {int(layer): _bounded(own) for layer, own in layers.items()}
    return bounded


def _few_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that describe layers, for the first layer of each kind."""
    if "num_hidden_layers" not in values:  # the list of layers determines it
        values["num_hidden_layers"] = len(values["layers_block_type"])
    number = values["num_hidden_layers"]
    by_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple))
        and len(value) == number > 1
        and name != "full_attn_idxs"  # layer numbers, which `layer_types` contains as well
    }
    first: dict[tuple[str, ...], int] = {}
    for layer, kind in enumerate(zip(*by_layer.values(), strict=True)):
        first.setdefault(tuple(map(str, kind)), layer)
    chosen = list(first.values())
    if values.get("num_kv_shared_layers"):  # each kind once with its own keys and once without
        changes: dict[str, Any] = {"num_kv_shared_layers": len(chosen)}
        chosen = chosen * 2
    else:
        changes = {}
        chosen = chosen if len(chosen) > 1 else [0, min(1, number - 1)]
    changes["num_hidden_layers"] = len(chosen)
    own = values.get("per_layer_config")
    if own:
        changes["per_layer_config"] = {
            position: own[layer] for position, layer in enumerate(chosen) if layer in own
        }
    return changes | {name: [value[layer] for layer in chosen] for name, value in by_layer.items()}


def small_model(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a random float64 model of a small configuration.

    No parameter stays at 0 or 1 (norms, sinks, biases, time steps), which would hide a missing
    term.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return randomized(model).double()


@torch.no_grad()
def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Move every parameter of a small model away from its initial value (in place)."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * (0.15 if parameter.dim() > 1 else 0.2))
    for name, values in model.named_buffers():
        if "correction_bias" in name:
            values.add_(torch.randn(values.shape, generator=generator) * 0.2)
    return model

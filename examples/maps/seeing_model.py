"""The model of the vision demo before any training: its tokenizer, and random weights.

It has the Qwen3-VL architecture. A position holds 16 x 16 pixels, as a field of the maps does.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from examples.shop.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    save_tokenizer,
    train_tokenizer,
)

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
_PATCH, _MERGED, _FRAMES = 8, 2, 2
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": _PATCH,
    "merge_size": _MERGED,
    "temporal_patch_size": _FRAMES,
    "size": {"shortest_edge": 256, "longest_edge": 16384},
}
SEEING_TEMPLATE = (
    """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}{% else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '"""
    + VISION_START
    + IMAGE
    + VISION_END
    + """' }}{% else %}{{- part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
    + CHAT_TEMPLATE.replace(
        "message.role + '\\n' + message.content",
        "message.role + '\\n' + shown(message.content)",
    )
)
"""The shop's template, extended by images in user messages."""


def write_random_model(folder: Path, texts: Sequence[str], seed: int) -> int:
    """Write a model with random weights, and a tokenizer trained on the texts.

    Returns:
        The number of its parameters.
    """
    special = (*SPECIAL_TOKENS, VISION_START, VISION_END, IMAGE, VIDEO)
    tokenizer = train_tokenizer(texts, special)
    save_tokenizer(tokenizer, folder, SEEING_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(_config(tokenizer))
    # The model distinguishes places from the first step only if they are as strong as colors.
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.5)
    model.generation_config.eos_token_id = tokenizer.token_to_id(TURN_END)
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    ids, width = tokenizer.get_vocab(), 128
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(ids),
            "hidden_size": width,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": ids[TURN_END],
            "pad_token_id": ids[END_OF_TEXT],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": width,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGED,
            "temporal_patch_size": _FRAMES,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )

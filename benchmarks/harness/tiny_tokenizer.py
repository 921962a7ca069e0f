"""Tokenizer directories in Qwen's layout: the 256 bytes and the special tokens, or a few words more."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CHAT_TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(
    directory: Path,
    template: str = CHAT_TEMPLATE,
    *,
    texts: Sequence[str] = (),
    special: Sequence[str] = SPECIAL,
    **config: object,
) -> Path:
    """Write the files that a renderer reads; no weights.

    Args:
        directory: the target.
        template: the chat template.
        texts: texts to learn merges from, after Qwen's normalizer and split; without texts, only
            bytes.
        special: control tokens; turns end with `<|im_end|>`.
        **config: further entries of `config.json`; a `str` stands for the id of that token.
    """
    tokenizer = _learnt(texts, special) if texts else _bytes_alone()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    stop = {"eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (directory / "generation_config.json").write_text(json.dumps(stop))
    more = {k: tokenizer.token_to_id(v) if isinstance(v, str) else v for k, v in config.items()}
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **stop, **more}))
    return directory


def _bytes_alone() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: position for position, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _learnt(texts: Sequence[str], special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


IMAGE_TOKEN = "<|image_pad|>"
# As in Qwen2.5-VL: one placeholder per image, between two marks.
SEEING = CHAT_TEMPLATE.replace(
    "message.content +",
    "(message.content if message.content is string else shown(message.content)) +",
)
SEEING = (
    """{%- macro shown(parts) %}{%- for part in parts %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endmacro %}
"""
    + SEEING
)


def write_seeing_tokenizer(directory: Path, template: str = SEEING) -> Path:
    """Write the files of a vision model: its template writes one placeholder per image."""
    special = (*SPECIAL, "<|vision_start|>", IMAGE_TOKEN, "<|vision_end|>")
    return write_tokenizer(directory, template, special=special, image_token_id=IMAGE_TOKEN)

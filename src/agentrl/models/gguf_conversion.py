"""Converts a GGUF file into a checkpoint in Hugging Face's layout.

python -m agentrl.models.gguf_conversion FILE.gguf DIRECTORY

Started by `models.checkpoints.gguf`. The weights are written in bfloat16: AgentRL trains no quantized
weights. The tokenizer that transformers reads out of a GGUF file may name the wrong end of a turn;
what the chat template writes at the end of a reply decides.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.turn_ends import turn_ends


def convert(file: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file.

    Args:
        file: the GGUF file of a whole model.
        folder: an existing directory to fill.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, **_dense_weights()
    )
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    is_tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (is_tied and name in tied)
    }
    save_torch_state_dict(state, folder)
    ids = _end_ids(tokenizer, model.generation_config.eos_token_id)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[0])
    if tokenizer.pad_token_id in (None, *ids, tokenizer.bos_token_id):
        tokenizer.pad_token = _padding(tokenizer, ids)
    tokenizer.save_pretrained(folder)
    end = ids if len(ids) > 1 else ids[0]
    named = {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    config: dict[str, Any] = model.config.to_diff_dict() | named | {"dtype": "bfloat16"}
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = named | {"bos_token_id": tokenizer.bos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _dense_weights() -> dict[str, Any]:
    """Return the arguments that make transformers dequantize, in the versions that ask for it."""
    settings = getattr(transformers, "GgufConfig", None)
    if settings is None or "dequantize" not in inspect.signature(settings).parameters:
        return {}
    return {"quantization_config": settings(dequantize=True)}


def _end_ids(tokenizer: Any, named: int | list[int] | None) -> list[int]:
    """Return the ids that end a turn, those that the chat template writes first."""
    written: list[int] = []
    if tokenizer.chat_template:
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        named_tokens = {key: str(text) for key, text in tokenizer.special_tokens_map.items()}
        ends = turn_ends(ChatTemplate(tokenizer.chat_template, named_tokens), added)
        written = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    others = [named] if isinstance(named, int) else list(named or ())
    if not written and tokenizer.eos_token_id is not None:
        others.append(tokenizer.eos_token_id)
    return list(dict.fromkeys([*written, *others]))


def _padding(tokenizer: Any, ends: list[int]) -> str:
    """Return a token for padding that ends no turn, if there is one."""
    for token in ("<|endoftext|>", "<pad>", "<|finetune_right_pad_id|>", tokenizer.unk_token):
        id_ = tokenizer.get_vocab().get(token)
        if id_ is not None and id_ not in ends:
            return str(token)
    return str(tokenizer.convert_ids_to_tokens(ends[0]))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

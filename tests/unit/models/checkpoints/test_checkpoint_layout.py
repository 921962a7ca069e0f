"""Parameters as checkpoints hold them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.training import write_moe_model
from transformers import AutoModelForCausalLM

from agentrl.models.checkpoints.checkpoint_layout import checkpoint_tensors


def test_what_parameters_are_in_a_checkpoint_is_what_files_hold_and_no_copy(tmp_path: Path) -> None:
    path = write_moe_model(tmp_path / "experts")
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    sent = {}
    for name, tensor in state.items():
        for sent_name, part in checkpoint_tensors(name, tensor):
            sent[sent_name] = part
            assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert part.is_contiguous()
    files = load_file(path / "model.safetensors")
    assert sent.keys() == files.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in files.items())

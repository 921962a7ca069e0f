"""The demo's model as a mixture of experts, with its tokenizer and chat template."""

import shutil
from pathlib import Path

import torch
from support.demo_run import ROOT
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

DEMO_MODEL = ROOT / "assets/demo/model"
_NOISE = 3.0
"""How far an expert is from the MLP that it was copied from, as a share of each weight."""


@torch.no_grad()
def write_demo_mixture(directory: Path, *, num_experts: int = 32, num_chosen: int = 2) -> Path:
    """Make experts of every MLP by copying it with noise, and routers that hardly tell them apart.

    The chosen experts' weights add up to one, so without the noise it would be the demo's model.
    With it, it is as unsure of every token as a random model, and the choice of experts counts.
    """
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    shared = dense.config.to_dict()
    for name in ("architectures", "model_type", "layer_types", "transformers_version"):
        del shared[name]
    config = Qwen3MoeConfig(
        **shared,
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        moe_intermediate_size=dense.config.intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    mixture = Qwen3MoeForCausalLM(config)
    mixture.load_state_dict(dense.state_dict(), strict=False)
    for layer, origin in zip(mixture.model.layers, dense.model.layers, strict=True):
        mlp, experts = origin.mlp, layer.mlp.experts
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        for stacked, weight in (
            (experts.gate_up_proj, gate_up),
            (experts.down_proj, mlp.down_proj.weight),
        ):
            stacked.copy_(weight * (1 + _NOISE * torch.randn_like(stacked)))
        layer.mlp.gate.weight.normal_(std=0.03)
    mixture.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory

"""Tiny random models of commonly trained families, one configuration each."""

from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from agentrl.models.vision.image_encoders import model_class

VOCABULARY = 40
WINDOW = 7

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Sizes of the language model, common to all families."""
_HEADS = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "num_key_value_heads": 4,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Gated DeltaNet layers."""
_TWICE = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_RECURRENT = {"num_hidden_layers": 3, "layer_types": [*["linear_attention"] * 2, "full_attention"]}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_GEMMA = {**_HEADS, **_WINDOWED, "query_pre_attn_scalar": 16}
_LAYER_INPUTS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_GEMMA_4 = {**_HEADS, **_WINDOWED, **_LAYER_INPUTS}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
_MAMBA = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_SCALED = ("logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # full attention
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", _HEADS),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEADS),
    "glm4": ("glm4", _HEADS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "phi3": ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "granite": ("granite", dict(zip(_SCALED, (4.0, 2.0, 0.5, 0.3), strict=True))),
    "ernie4_5": ("ernie4_5", _HEADS),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEADS),
    "seed_oss": ("seed_oss", _HEADS),
    "olmo2": ("olmo2", {}),
    # full attention, experts
    "qwen2_moe": ("qwen2_moe", _SHARED_EXPERT),
    "qwen3_moe": ("qwen3_moe", {**_HEADS, **_EXPERTS}),
    "glm4_moe": (
        "glm4_moe",
        {**_HEADS, **_ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "mixtral": ("mixtral", _LOCAL_EXPERTS),
    "minimax_m2": ("minimax_m2", {**_HEADS, **_LOCAL_EXPERTS}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**_ERNIE, "moe_intermediate_size": 32},
    ),
    # latent attention
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, **_ROUTED, **_GROUPED, "q_lora_rank": 24, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, **_GROUPED, "q_lora_rank": 24}),
    # windows, sinks, caps
    "mistral_windowed": ("mistral", {"sliding_window": WINDOW}),
    "phi3_windowed": ("phi3", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3_text": ("gemma3_text", _GEMMA),
    "gemma4_text": ("gemma4_text", _GEMMA_4),
    "gemma4_text_shared": (
        "gemma4_text",
        {**_GEMMA_4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, **_TWICE},
    ),
    "gpt_oss": ("gpt_oss", {**_HEADS, **_WINDOWED, **_LOCAL_EXPERTS, "intermediate_size": 32}),
    "olmo3": ("olmo3", _WINDOWED),
    "exaone4": ("exaone4", _WINDOWED),
    "cohere2": ("cohere2", _WINDOWED),
    # recurrent
    "qwen3_next": ("qwen3_next", {**DELTA, **_HEADS, **_SHARED_EXPERT, **_RECURRENT}),
    "qwen3_5_text": ("qwen3_5_text", {**DELTA, **_HEADS, **_RECURRENT}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA, **_HEADS, **_SHARED_EXPERT, **_HYBRID}),
    "olmo_hybrid": ("olmo_hybrid", _HYBRID),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            **_LOCAL_EXPERTS,
            **_RECURRENT,
            "moe_intermediate_size": 32,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_HEADS,
            **_ROUTED,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "expand": 1,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_LOCAL_EXPERTS,
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "mamba", "attention"],
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
        },
    ),
    "falcon_h1": ("falcon_h1", {**_HEADS, **_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
}
"""Name in the table of families: transformers' model type, and what its configuration adds."""
FURTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("apertus", "cohere", "glm", "gpt_neox", "olmo", "phi")},
    "gemma": ("gemma", _HEADS),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "granitemoe": ("granitemoe", _LOCAL_EXPERTS),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("phimoe", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "bamba": (
        "bamba",
        {**_MAMBA, "mamba_n_heads": 8, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
}
"""Proven exact on token trees as well, and not in the table."""


def tiny_config(family: str) -> PretrainedConfig:
    """The configuration of a family's tiny model."""
    model_type, own = {**FAMILIES, **FURTHER_FAMILIES}[family]
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**SHAPE, **own})
    return config


def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of a family."""
    model = small_model(tiny_config(family))
    model.to(dtype=dtype)  # type: ignore[call-arg]
    return model


def small_model(config: PretrainedConfig) -> PreTrainedModel:
    """A random float64 model of a small configuration."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config).from_config(config, dtype=torch.float32)
    return randomized(model).double()


@torch.no_grad()
def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Move every parameter of a small model away from its initial value (in place).

    A parameter that stays at 0 or 1 (norms, sinks, biases, time steps) would hide a missing term.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * (0.15 if parameter.dim() > 1 else 0.2))
    for name, values in model.named_buffers():
        if "correction_bias" in name:
            values.add_(torch.randn(values.shape, generator=generator) * 0.2)
    return model

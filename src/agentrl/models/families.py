"""Families of models that tests prove exact, by the `model_type` of their configurations."""

_BY_LAYERS = {
    "full attention": "apertus cohere ernie4_5 gemma glm glm4 gpt_neox granite hunyuan_v1_dense llama "
    "ministral3 mistral olmo olmo2 phi phi3 qwen2 qwen3 seed_oss smollm3 starcoder2",
    "experts": "ernie4_5_moe glm4_moe granitemoe minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe",
    "latent attention": "deepseek_v3 glm4_moe_lite",
    "windows, sinks, caps": "cohere2 exaone4 gemma2 gemma3_text gemma4_text gpt_oss olmo3",
    "recurrent": "bamba falcon_h1 granitemoehybrid kimi_linear lfm2 lfm2_moe nemotron_h olmo_hybrid "
    "qwen3_5_moe_text qwen3_5_text qwen3_next",
    "images": "gemma3 gemma4 qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe",
}
TREE_FAMILIES = frozenset(name for names in _BY_LAYERS.values() for name in names.split())
"""Their gradients on token trees are those of separate turns."""
STAGE_FAMILIES = TREE_FAMILIES - {"bamba", "falcon_h1", "gemma4_text", "olmo"}
"""Their layers pass on only hidden states, so that a pipeline may divide them."""

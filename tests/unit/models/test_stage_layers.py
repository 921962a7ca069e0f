import copy

import pytest
import torch
from accelerate import init_empty_weights
from harness.tiny_families import FAMILIES, FURTHER_FAMILIES, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.models.families import STAGE_FAMILIES
from agentrl.models.stage_layers import check_stages, keep_stage


def on_meta(*, tied: bool) -> PreTrainedModel:
    config = tiny_config("qwen3")
    config.num_hidden_layers, config.tie_word_embeddings = 5, tied
    config.layer_types = ["full_attention"] * 5
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_stages_together_have_each_parameter_once(tied: bool) -> None:
    whole = dict(on_meta(tied=tied).named_parameters())
    models = [on_meta(tied=tied) for _ in range(3)]
    stages = [keep_stage(model, number, 3) for number, model in enumerate(models)]
    held = [dict(model.named_parameters()).keys() for model in models]
    for stage, names in zip(stages, held, strict=True):
        assert names == {name for name in whole if stage.has(name)}
    embedding = "model.embed_tokens.weight"
    assert [stage.tied for stage in stages] == [embedding if tied else None, None, stages[0].tied]
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in held]
    assert layers == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert "model.norm.weight" in held[2]
    assert held[0] | held[1] | held[2] == whole.keys()
    assert held[0] & held[2] == ({embedding} if tied else set())


def two_stages(whole: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model that two stages compute one after the other."""
    stages = [copy.deepcopy(whole) for _ in range(2)]
    first, last = (keep_stage(model, number, 2) for number, model in enumerate(stages))
    assert first.entry is None
    assert last.entry is not None
    hidden = stages[0].base_model(input_ids=tokens, use_cache=False).last_hidden_state
    last.entry.stage_input = hidden
    logits: torch.Tensor = stages[1](inputs_embeds=torch.zeros_like(hidden), use_cache=False).logits
    return logits


A_FEW = ("qwen3", "gemma3_text", "granite", "qwen3_moe")
"""Windows by layer, scaled embeddings, scaled logits, experts."""
NAMES = [
    name
    for name, (model_type, _) in (FAMILIES | FURTHER_FAMILIES).items()
    if model_type in STAGE_FAMILIES
]


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in A_FEW else pytest.mark.slow) for name in NAMES],
)
@torch.no_grad()
def test_two_stages_compute_what_the_whole_does(family: str) -> None:
    # torch's kernel for experts has no float64.
    whole = tiny_model(family, torch.float32).eval()
    tokens = torch.arange(12)[None] % 8
    torch.testing.assert_close(
        two_stages(whole, tokens),
        whole(input_ids=tokens, use_cache=False).logits,
        rtol=1e-5,
        atol=1e-5,
    )
    check_stages(whole.config, 2)


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "gemma4_text_shared", "olmo"])
def test_layers_that_may_hand_on_more_than_hidden_states_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"--pp_size 2: \w+ models cannot be trained in a"):
        check_stages(tiny_config(family), 2)

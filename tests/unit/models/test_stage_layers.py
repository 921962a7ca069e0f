import pytest
import torch
from accelerate import init_empty_weights
from harness.tiny_families import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import ConfigError
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "granite", "qwen3_moe"])
def test_two_stages_compute_what_the_whole_does(family: str) -> None:
    """Windows by layer, scaled embeddings, scaled logits, experts."""
    before = torch.get_rng_state()
    check_stages(tiny_config(family), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_that_hand_on_more_than_hidden_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pp_size 2: gemma4_text models cannot be trained in a"):
        check_stages(tiny_config("gemma4_text_shared"), 2)

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.tiny_families import tiny_model
from harness.trees import random_group, tiny_policy
from safetensors.torch import load_file, save_file
from support.full_disk import full_disk
from transformers import (
    AutoModelForCausalLM,
)
from transformers.utils import logging

from agentrl.data.rows import TokenTree
from agentrl.errors import ConfigError, WriteError
from agentrl.models.checkpoint_export import read_tokenizer_files, save_hf
from agentrl.models.load import load_policy, wrap_policy
from agentrl.models.policy import target_logprobs
from agentrl.plugins.engine.generation.model_runner import load_model

logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("given", [False, True], ids=["own", "gathered"])
def test_saved_policy_loads_with_the_same_logprobs(
    tmp_path: Path, architecture: str, given: bool
) -> None:
    policy = tiny_policy(architecture, torch.float32)
    row = TokenTree.from_tokens(random_group(2).turns).row
    save_hf(policy, tmp_path / "policy", state_dict=policy.model.state_dict() if given else None)
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(target_logprobs(loaded, row).logprobs, target_logprobs(policy, row).logprobs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "llama"])
def test_a_saved_policy_is_what_transformers_writes(tmp_path: Path, family: str) -> None:
    policy = wrap_policy(tiny_model(family))
    policy.model.save_pretrained(tmp_path / "expected")
    for name in ("own", "gathered"):
        state = policy.model.state_dict() if name == "gathered" else None
        path = save_hf(policy, tmp_path / name, state_dict=state)
        for file in (tmp_path / "expected").iterdir():
            assert (path / file.name).read_bytes() == file.read_bytes()


def test_saving_again_replaces_the_directory_and_leaves_no_litter(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    policy = tiny_policy(dtype=torch.float32)
    save_hf(policy, tmp_path / "policy")
    (tmp_path / "policy" / "old").write_text("")
    save_hf(policy, tmp_path / "policy", tokenizer_files=read_tokenizer_files(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "source"]
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "old" not in names


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    policy = tiny_policy(dtype=torch.float32)
    weights = save_hf(policy, tmp_path / "policy") / "model.safetensors"
    before = weights.read_bytes()
    with (
        full_disk(len(before) // 2),
        pytest.raises(WriteError, match=r"cannot write .*/policy: "),
    ):
        save_hf(policy, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert weights.read_bytes() == before


def test_given_weights_are_written_instead_of_the_policys(tmp_path: Path) -> None:
    policy = tiny_policy(dtype=torch.float32)
    weights = {name: torch.zeros_like(t) for name, t in policy.model.state_dict().items()}
    save_hf(policy, tmp_path / "policy", state_dict=weights)
    assert not any(t.any() for t in load_file(tmp_path / "policy" / "model.safetensors").values())


def test_whoever_may_look_into_the_directory_may_read_the_weights(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    allowed = (tmp_path / "beside").stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {allowed}


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    weights = load_file(path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights are missing from .*: model\.norm\.weight"):
        load_policy(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)},
            r"does not describe: model\.layers\.9\.mlp\.up_proj\.weight",
        ),
        (
            lambda weights: weights | {"model.norm.weight": torch.zeros(2)},
            r"do not match its config.json: model\.norm\.weight has shape \[2\] instead of \[32\]",
        ),
    ],
    ids=["unexpected", "wrong-shape"],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
) -> None:
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    weights = load_file(path / "model.safetensors")
    save_file(change(weights), path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_policy(path)


@pytest.mark.parametrize(
    ("family", "further"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("glm4_moe", "model.layers.2.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_text", "mtp.layers.0.mlp.gate.weight"),
    ],
)
def test_heads_that_predict_further_tokens_are_left_out_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, further: str
) -> None:
    model = tiny_model(family, torch.float32)
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {further: torch.zeros(2, 2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_policy(tmp_path)
    assert f"no place for {further} (usually heads that predict further tokens" in caplog.text
    weights["model.layers.9.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not describe: model\.layers\.9\.eh_proj"):
        load_policy(tmp_path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    (path / "model.safetensors").write_text("nothing")
    with pytest.raises(ConfigError, match=r"cannot load weights from .*model\.safetensors"):
        load_policy(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"no weights in .*model\.safetensors and .* both missing"
    ):
        load_policy(path)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_bit_for_bit_those_that_transformers_loads(
    tmp_path: Path, architecture: str, stored: torch.dtype
) -> None:
    policy = tiny_policy(architecture, torch.float32)
    policy.to(stored).model.save_pretrained(tmp_path, max_shard_size="20KB")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load_policy(tmp_path).model
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(plain, kind)())
        found = dict(getattr(loaded, kind)())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_tied_weights_are_one_whatever_name_they_have_in_the_file(tmp_path: Path) -> None:
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    weights = load_file(path / "model.safetensors")
    table = weights.pop("model.embed_tokens.weight")
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    for names in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        tables = {name: table.clone() for name in names}
        save_file(weights | tables | computed, path / "model.safetensors", {"format": "pt"})
        model = load_policy(path).model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, table)


def test_how_a_model_generates_is_kept_for_its_exports(tmp_path: Path) -> None:
    path = save_hf(tiny_policy(dtype=torch.float32), tmp_path / "policy")
    settings = {"eos_token_id": [5, 7], "do_sample": True, "temperature": 0.6}
    (path / "generation_config.json").write_text(json.dumps(settings))
    again = save_hf(load_policy(path), tmp_path / "again")
    kept = json.loads((again / "generation_config.json").read_text())
    assert settings.items() <= kept.items()


def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model configuration at"):
        load_policy(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_under_autocast_layers_keep_their_input_in_its_precision(architecture: str) -> None:
    policy = tiny_policy(architecture, torch.float32)
    met = []
    for layer in policy.model.model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: met.append(arguments[0].dtype))
    row = TokenTree.from_tokens(random_group(2).turns).row
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = target_logprobs(policy, row).logprobs
    assert met == [torch.bfloat16] * len(policy.model.model.layers)
    assert logprobs.dtype == torch.float32


KERNEL = "kernels-community/flash-attn"


@pytest.mark.parametrize("load", [load_policy, lambda path: load_model(path, torch.float32)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": f"paged|{KERNEL}@main:attend"},
        {"attn_implementation": {"": "eager", "text_config": KERNEL}},
        {"experts_implementation": KERNEL},
        {"vision_config": {"attn_implementation": KERNEL}},
    ],
)
def test_code_on_the_hub_is_refused_by_name(
    tmp_path: Path, load: Callable[[Path], object], family: str, fields: dict[str, object]
) -> None:
    path = save_hf(wrap_policy(tiny_model(family)), tmp_path / "model")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ConfigError, match=rf"_implementation .*{KERNEL}.* is code on the Hugging"):
        load(path)

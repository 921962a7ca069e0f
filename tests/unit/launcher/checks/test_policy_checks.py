"""What is known of a model before a process starts, and what follows from it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.tiny_families import tiny_model

from agentrl.config.loading import build_config, write_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.launcher.checks.policy_checks import check_policy
from agentrl.launcher.model_limits import fitted_to_model
from agentrl.plugins.integrations import AgentTrainer

DEMO = Path(__file__).parents[4] / "assets/demo/model"
QUESTIONS = [{"id": "a", "query": "How many?", "answer": "1"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if quiet %}quiet{% endif %}{% endif %}"
)


def write_model(folder: Path, **changes: object) -> Path:
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def answer(task: Any, endpoint: Any) -> str:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_name_or_path": "./nowhere"}, "no such directory"),
        ({"loss_calculator": "PPO"}, "loss_calculator"),
        ({"tp_size": 4}, "do not match a mesh"),
        ({"inf_tp_size": 2}, "a setting of SGLang"),
        ({"chat_template": "{% for %}"}, "does not compile"),
    ],
)
def test_a_trainer_is_refused_when_it_is_made(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentTrainer(answer, settings, train_dataset=QUESTIONS, run_path=tmp_path)


def test_a_trainer_without_a_configuration_trains_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = AgentTrainer(answer, train_dataset=QUESTIONS, run_path=tmp_path)
    assert trainer.config.model.model_name_or_path == str(DEMO)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": "abc"}, "hidden_size is 'abc', not a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a positive whole number"),
        ({"vocab_size": True}, "vocab_size is True, not a positive whole number"),
        ({"num_key_value_heads": [2, 1.5]}, "num_key_value_heads is 1.5, not a positive"),
        ({"text_config": {"num_hidden_layers": -2}}, "num_hidden_layers is -2, not a positive"),
        ({"text_config": "qwen3"}, "text_config is not a JSON object"),
    ],
)
def test_a_size_that_is_none_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(ConfigError) as caught:
        check_policy(build_config({"model_name_or_path": str(model)}))
    assert str(caught.value).startswith(f"{model / 'config.json'}: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["router_replay", "lora_rank"])
def test_a_configuration_that_is_no_json_is_named_whatever_reads_it_first(
    tmp_path: Path, flag: str
) -> None:
    model = write_model(tmp_path / "model")
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        check_policy(build_config({"model_name_or_path": str(model), flag: "1"}))


def begun(folder: Path, **changes: object) -> Path:
    """The output directory of a run that stopped after step 7, with such a model."""
    write_model(folder / "checkpoints/000007/model", **changes)
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"vocab_size": 700}, "vocab_size 700"),
        ({"model_type": "qwen3_vl", "text_config": {"vocab_size": 9}}, "qwen3_vl"),
    ],
)
def test_a_run_does_not_go_on_with_another_model(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    output = begun(tmp_path / "output", **changes)
    given = {"model_name_or_path": str(DEMO), "output_dir": str(output)}
    config = build_config(given)
    with pytest.raises(ConfigError, match=rf"000007.*{named}.*another --run_name"):
        check_policy(config)
    check_policy(config, trains=False)
    check_policy(build_config({**given, "fresh": "true", "delete_existing": "true"}))


def test_a_run_goes_on_with_its_own_model_wherever_that_lies(tmp_path: Path) -> None:
    output = begun(tmp_path / "output", transformers_version="4", vocab_size=None)
    check_policy(build_config({"model_name_or_path": str(DEMO), "output_dir": str(output)}))


def test_a_long_context_bounds_prompts_and_recomputes_activations(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", max_position_embeddings=40_960)
    config, notes = fitted_to_model(build_config({"model_name_or_path": str(path)}), path)
    assert config.sampling.max_prompt_tokens == 40_960 - 1024
    assert config.trainer.gradient_checkpointing
    assert len(notes) == 2


def test_a_model_that_nobody_named_is_said_to_be_the_demo_s() -> None:
    _, notes = fitted_to_model(build_config({}), DEMO)
    assert "no --model_name_or_path: using the demo's tiny model" in notes[0]


def test_without_a_gpu_a_forward_pass_is_small(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", max_position_embeddings=2048)
    given = {"model_name_or_path": str(path), "max_prompt_tokens": 1000, "max_new_tokens": 500}
    config, notes = fitted_to_model(build_config(given), path, trains_on="cpu")
    assert config.trainer.max_tokens == 8192
    assert notes == ["--max_tokens 8192, without a GPU"]
    config = build_config(given | {"max_tokens": 9000})
    assert fitted_to_model(config, path, trains_on="cpu") == (config, [])


@pytest.mark.parametrize(("gigabytes", "tokens"), [(64, 8192), (24, 4096), (12, 2048), (2, 1024)])
def test_without_a_gpu_a_forward_pass_fits_the_memory(
    gigabytes: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PHYS_PAGES": gigabytes * 2**20, "SC_PAGE_SIZE": 1024}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    path = write_model(tmp_path / "m", max_position_embeddings=8192)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | shape))
    config, notes = fitted_to_model(
        build_config({"model_name_or_path": str(path)}), path, trains_on="cpu"
    )
    assert config.trainer.max_tokens == tokens
    assert f"--max_tokens {tokens}, " in " ".join(notes)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("qwen3_5_text", "flash-linear-attention"), ("nemotron_h", "mamba-ssm"), ("qwen3", None)],
)
def test_on_a_gpu_missing_kernels_of_recurrent_layers_are_named(
    family: str, kernels: str | None, tmp_path: Path
) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    _, notes = fitted_to_model(
        build_config({"model_name_or_path": str(tmp_path)}), tmp_path, trains_on="gpu"
    )
    named = [note for note in notes if "pip install" in note]
    assert len(named) == (kernels is not None)
    assert all(note.startswith(f"{kernels} is not installed: ") for note in named)


SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
}
"""The shape of SmolLM2-135M."""


def smol(tmp_path: Path, **flags: object) -> tuple[RootConfig, list[str]]:
    """Return what is filled in for a model of this shape and an engine with two threads."""
    path = tmp_path / "m"
    if not path.exists():
        write_model(path, **SMOL)
    given = {"model_name_or_path": str(path), "output_dir": str(tmp_path / "out")}
    config = build_config(given | {"inference_threads": 2} | flags)
    return fitted_to_model(config, path, trains_on="cpu", samples_on="cpu")


def test_replies_and_steps_fit_what_a_cpu_samples(tmp_path: Path) -> None:
    config, notes = smol(tmp_path)
    assert (config.sampling.max_new_tokens, config.trainer.groups_per_step) == (256, 4)
    assert config.inference.max_running_requests == 32
    assert "--max_new_tokens 256, because this CPU samples about 74 tokens/s" in notes
    assert "--groups_per_step 4, so that a step is sampled in about 2 minutes" in notes


def test_given_sizes_are_kept_on_a_cpu(tmp_path: Path) -> None:
    config, _ = smol(tmp_path, max_new_tokens=8192, gradient_accumulation_steps=48)
    assert (config.sampling.max_new_tokens, config.trainer.groups_per_step) == (8192, None)
    assert config.inference.max_running_requests == 64


def test_servers_elsewhere_are_not_limited_by_this_cpu(tmp_path: Path) -> None:
    config, _ = smol(tmp_path, inference_backend="sglang")
    assert (config.sampling.max_new_tokens, config.trainer.groups_per_step) == (7168, None)


def test_a_resumed_run_keeps_the_sizes_of_its_start(tmp_path: Path) -> None:
    config, _ = smol(tmp_path, lora_rank=8)
    write_config(config, tmp_path / "out/config.yaml")
    resumed, _ = smol(tmp_path, lora_rank=8, inference_threads=64)
    assert resumed.sampling.max_new_tokens == 256
    assert resumed.trainer.groups_per_step == 4
    fresh, _ = smol(tmp_path, fresh=True, inference_threads=64)
    assert fresh.sampling.max_new_tokens > 256


def test_an_adapter_gets_a_higher_learning_rate(tmp_path: Path) -> None:
    config, notes = smol(tmp_path, lora_rank=16)
    assert config.trainer.learning_rate == 1e-5
    assert "--learning_rate 1e-05, because an adapter is trained" in notes
    assert smol(tmp_path, lora_rank=16, learning_rate=1e-6)[0].trainer.learning_rate == 1e-6


def test_held_out_questions_are_evaluated_at_both_ends(tmp_path: Path) -> None:
    held_out = {"eval_file": str(DEMO.parent / "eval.jsonl")}
    config, notes = smol(tmp_path, **held_out)
    assert config.trainer.eval_strategy == "ends"
    assert "--eval_strategy ends, because there are held-out questions" in notes
    assert smol(tmp_path, **held_out, eval_strategy="no")[0].trainer.eval_strategy == "no"


def test_a_gpu_that_samples_is_not_limited_by_the_cpu(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", **SMOL)
    config = build_config({"model_name_or_path": str(path)})
    config, _ = fitted_to_model(config, path, trains_on="gpu", samples_on="gpu")
    assert config.sampling.max_new_tokens == 7168


def test_what_a_flag_gives_is_not_fitted(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", max_position_embeddings=40_960)
    given = {"max_prompt_tokens": 100_000, "gradient_checkpointing": False}
    config = build_config({"model_name_or_path": str(path), **given})
    assert fitted_to_model(config, path) == (config, [])


def test_a_template_and_its_variables_are_stored_with_the_run_and_render(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    given = {
        "chat_template": str(tmp_path / "own.jinja"),
        "chat_template_kwargs": '{"quiet": true}',
    }
    config = build_config(given)
    assert config.model.chat_template == TEMPLATE
    renderer = check_policy(config)
    ids = renderer.render([{"role": "user", "content": "hi"}])
    assert renderer.decode(ids) == "[user]hi<|im_end|>[assistant]quiet"

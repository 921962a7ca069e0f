"""A small copy of a model decides whether it is trained on token trees; nothing is refused by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.tiny_families import FAMILIES
from harness.trees import tiny_policy
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from agentrl.config.sections import ModelSection, TrainerSection
from agentrl.distributed import MeshShape
from agentrl.errors import ConfigError
from agentrl.trainer.learner import merge_trial
from agentrl.trainer.learner.merge_trial import why_unmerged, with_exact_merge
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*falling back to its reference PyTorch implementation"
)
MODEL_TYPES = sorted({model_type for model_type, _ in FAMILIES.values()} - {"lfm2_moe"})
"""Those with a complete default configuration."""
UNDECLARED = ("apertus", "bamba", "gpt_neox", "phimoe", "starcoder2")
A_FEW = ("gpt_oss", "qwen3_5_text", "starcoder2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rope(kind: str, **more: Any) -> PretrainedConfig:
    return LlamaConfig(
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, **more}
    )


def settings(path: Path) -> LearnerSettings:
    return LearnerSettings(
        weights=StartWeights(path),
        model=ModelSection(model_name_or_path=str(path)),
        trainer=TrainerSection(),
        algorithm=None,
        seed=0,
    )


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in A_FEW else pytest.mark.slow)
        for name in (*MODEL_TYPES, *UNDECLARED)
    ],
)
def test_models_of_known_kinds_pass_at_their_real_sizes(model_type: str) -> None:
    assert why_unmerged(AutoConfig.for_model(model_type)) is None


def test_a_recurrence_of_unknown_kind_shows_in_its_gradients() -> None:
    reason = why_unmerged(AutoConfig.for_model("jamba"))
    assert reason is not None
    assert "off by 0." in reason


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_row_are_never_tried(kind: str) -> None:
    reason = why_unmerged(rope(kind, short_factor=[1.0] * 64, long_factor=[2.0] * 64))
    assert reason == f"its rotary frequencies ({kind}) depend on the row's length"


def test_a_configuration_that_cannot_be_made_small_says_why() -> None:
    reason = why_unmerged(AutoConfig.for_model("rwkv"))
    assert reason == "a small copy of it could not be tested (KeyError: 'num_attention_heads')"


def test_an_outcome_is_kept_and_half_of_one_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model("qwen3")
    assert why_unmerged(config) is None
    (kept,) = cache.rglob("*.json")

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("tried out again")

    with monkeypatch.context() as patched:
        patched.setattr(merge_trial, "small_model", fails)
        assert why_unmerged(config) is None
        kept.write_text('{"error": ')
        assert "tried out again" in str(why_unmerged(config))
    assert why_unmerged(config) is None


def test_a_folder_that_takes_no_files_costs_only_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert why_unmerged(AutoConfig.for_model("qwen3")) is None


def test_what_cannot_be_merged_is_trained_turn_by_turn_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(tmp_path)
    rope("dynamic").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = with_exact_merge(given, MeshShape())
    assert found.trainer.merge == "none"
    (record,) = caplog.records
    assert record.message.startswith("NOT MERGED: llama models train one turn per forward pass")
    with pytest.raises(ConfigError, match="--cp_size 2 needs layers that support token trees"):
        with_exact_merge(given, MeshShape(cp=2))


def test_what_can_be_merged_keeps_its_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_policy().model.config.save_pretrained(tmp_path)
    given = settings(tmp_path)
    assert with_exact_merge(given, MeshShape()) is given
    assert not caplog.records

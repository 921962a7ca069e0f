"""What follows from the memory of a rank: what fits, and what does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugins.planner import memory_plan
from agentrl.plugins.planner.memory_plan import (
    GB,
    Cluster,
    MemoryPlan,
    RankMemory,
    named_gpu,
    plan_memory,
    rehearsed_rank,
)

DEMO = Path(__file__).parents[4] / "assets/demo/model"
RANK = RankMemory(
    weights=16 * GB,
    gradients=16 * GB,
    optimizer=32 * GB,
    activations=10 * GB,
    peak=74 * GB,
    host=0,
    num_parameters=4 * 10**9,
    num_trained=4 * 10**9,
)
H100 = Cluster(named_gpu("NVIDIA H100 80GB HBM3"), host_bytes=1000 * GB)


def config(**flags: Any) -> RootConfig:
    given = {"inference_backend": "sglang", "max_prompt_tokens": 12_288, "max_new_tokens": 2048}
    return build_config({"model_name_or_path": str(DEMO), **given, **flags})


@pytest.fixture(autouse=True)
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "rehearsed_rank", lambda *_, **__: RANK)


def plan(cluster: Cluster = H100, **flags: Any) -> MemoryPlan:
    return plan_memory(config(**flags), DEMO, cluster)


def test_a_plan_that_fits_says_so() -> None:
    found = plan()
    assert found.problems == ()
    assert list(found.lines())[-1] == "fits"
    parts = found.parts()
    assert parts["fits"] is True
    assert parts["trainer"]["peak"] == 74 * GB
    assert parts["exported_bytes"] == 8 * GB


def test_what_does_not_fit_comes_with_what_helps() -> None:
    found = plan(replace(H100, gpu=named_gpu("L40S")))
    assert found.problems[0] == "a trainer rank needs 74.0 GB, and has 46.3 GB"
    assert list(found.lines())[-1].startswith("what helps: --gradient_checkpointing true")


def test_exported_weights_take_host_memory_besides_offloaded_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = replace(RANK, peak=30 * GB, host=48 * GB)
    monkeypatch.setattr(memory_plan, "rehearsed_rank", lambda *_, **__: kept)
    exported = 2 * RANK.num_parameters
    assert plan(replace(H100, host_bytes=48 * GB + exported)).problems == ()
    assert plan(replace(H100, host_bytes=48 * GB + exported - 1)).problems == (
        "1 rank(s) keep 56.0 GB in host memory, exported weights included, and the machine has "
        "56.0 GB",
    )


def test_a_server_must_hold_the_longest_conversation() -> None:
    short = replace(named_gpu("L40S"), memory_mib=10_000)
    found = plan(replace(H100, gpu=short), max_prompt_tokens=10_000_000)
    assert any("raise --inf_tp_size" in problem for problem in found.problems)


def test_an_unfinished_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ConfigError, match=r"config.json lacks 'num_attention_heads'"):
        plan_memory(config(), tmp_path, H100)


def test_a_model_that_cannot_be_rehearsed_is_an_error_of_one_line(tmp_path: Path) -> None:
    described = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match=r"^cannot rehearse a step of this model: .*hidden_size"):
        rehearsed_rank(config(), tmp_path, on_gpu=False)

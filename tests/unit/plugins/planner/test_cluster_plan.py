"""What follows from the memory of a rank: what fits, and what limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugins.planner import cluster_plan
from agentrl.plugins.planner.cluster import GB, Cluster, named_gpu
from agentrl.plugins.planner.cluster_plan import (
    MONGOD_MS,
    SAMPLER_MS,
    ClusterPlan,
    plan_cluster,
    usual_workload,
)
from agentrl.plugins.planner.rehearsals import RankMemory

DEMO = Path(__file__).parents[4] / "assets/demo/model"
RANK = RankMemory(
    weights=16 * GB,
    gradients=16 * GB,
    optimizer=32 * GB,
    activations=30 * GB,
    peak=94 * GB,
    host=0,
    num_parameters=4 * 10**9,
    num_trained=4 * 10**9,
    flops_per_token=24e9,
    flops_per_pair=2e6,
    flops_per_head_position=2e9,
)
H100 = Cluster(named_gpu("NVIDIA H100 80GB HBM3"), host_bytes=1000 * GB, cores=64)


def imagined_rank(config: RootConfig, _: Path, *, on_gpu: bool) -> RankMemory:
    """Imagine a rank whose passes shrink with checkpointing, and all else with ranks."""
    trainer = config.trainer
    passes = 30 * GB // (3 if trainer.gradient_checkpointing else 1)
    return replace(RANK, peak=64 * GB // trainer.num_processes + passes)


def config(**flags: Any) -> RootConfig:
    given = {"inference_backend": "sglang", "max_prompt_tokens": 12_288, "max_new_tokens": 2048}
    return build_config({"model_name_or_path": str(DEMO), **given, **flags})


@pytest.fixture(autouse=True)
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_plan, "rehearsed_rank", imagined_rank)


def plan(cluster: Cluster = H100, **flags: Any) -> ClusterPlan:
    return plan_cluster(config(**flags), DEMO, cluster)


def test_what_does_not_fit_is_named_last() -> None:
    found = plan(max_tokens=16_384, loss_seq_chunk_size=1024)
    assert found.problems == ("a trainer rank needs 94.0 GB, and has 83.5 GB",)
    assert list(found.lines())[-1] == f"DOES NOT FIT: {found.problems[0]}"


def test_exported_weights_take_host_memory_besides_offloaded_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = replace(RANK, peak=30 * GB, host=48 * GB)
    monkeypatch.setattr(cluster_plan, "rehearsed_rank", lambda *_, **__: rank)
    exported = 2 * RANK.num_parameters
    assert plan(replace(H100, host_bytes=48 * GB + exported)).problems == ()
    assert plan(replace(H100, host_bytes=48 * GB + exported - 1)).problems == (
        "1 rank(s) keep 56.0 GB in host memory, exported weights included, and the machine has "
        "56.0 GB",
    )


def test_a_plan_that_fits_has_no_problems() -> None:
    found = plan(gradient_checkpointing=True)
    assert found.problems == ()
    parts = found.parts()
    assert parts["fits"] is True
    assert parts["trainer"]["peak"] == 74 * GB
    assert parts["publish"] == {"bytes": 8 * GB, "seconds": 0.8}


def test_times_follow_from_shapes_and_rates() -> None:
    found = plan(gradient_checkpointing=True, groups_per_step=8, num_generations=8)
    tokens = found.workload.tokens
    assert tokens == (12_288 + 2048) // 2
    each = 24e9 * tokens + 2e6 * tokens**2 / 2 + 2e9 * tokens / 2
    assert found.step_flops == pytest.approx(64 * each)
    # Recomputation makes the forward pass, a third of it all, once more.
    assert found.train_seconds == pytest.approx(64 * each * 4 / 3 / 989e12 / 0.24)
    longer = max(found.train_seconds, found.sample_seconds)
    assert found.step_seconds == pytest.approx(longer + 0.8)
    assert found.turns_per_second == pytest.approx(64 * 4 / found.step_seconds)


def test_a_run_has_gpu_hours() -> None:
    flags = config(gradient_checkpointing=True, num_gpus=8, max_steps=90)
    found = plan_cluster(flags, DEMO, H100, cluster_plan.usual_workload(flags, 4, None))
    hours = 90 * found.step_seconds / 3600
    assert found.parts()["run"] == {
        "steps": 90,
        "hours": pytest.approx(hours),
        "gpu_hours": pytest.approx(8 * hours),
    }
    [line] = [line for line in found.lines() if line.startswith("--max_steps 90:")]
    assert line.endswith(f"{8 * hours:,.1f} GPU hours")


def test_colocated_takes_turns() -> None:
    found = plan(gradient_checkpointing=True, colocated=True)
    both = found.train_seconds + found.sample_seconds
    assert found.step_seconds == pytest.approx(both + found.publish_seconds)


def test_a_server_must_hold_the_longest_conversation() -> None:
    short = replace(named_gpu("L40S"), memory_mib=10_000)
    found = plan(
        replace(H100, gpu=short), max_prompt_tokens=10_000_000, gradient_checkpointing=True
    )
    assert any("raise --inf_tp_size" in problem for problem in found.problems)


def test_few_cores_slow_short_conversations_down() -> None:
    one_core = replace(H100, cores=1, network_gb_per_second=1000)
    found = plan_cluster(
        config(gradient_checkpointing=True, max_prompt_tokens=400, max_new_tokens=100),
        DEMO,
        one_core,
        usual_workload(config(), turns=200, tokens=100),
    )
    assert found.problems == ()
    assert found.slows_down is not None
    cores = f"{found.turns_per_second * (SAMPLER_MS + MONGOD_MS) / 1000:.0f} cores, and the machine has 1;"
    assert f"samplers and mongod need {cores}" in found.slows_down
    assert f"slower because of: {found.slows_down}" in list(found.lines())


def test_an_unfinished_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ConfigError, match=r"config.json lacks 'num_attention_heads'"):
        plan_cluster(config(), tmp_path, H100)


def test_a_workload_may_be_given() -> None:
    found = usual_workload(config(), turns=20, tokens=5000)
    assert (found.turns, found.tokens) == (20, 5000)

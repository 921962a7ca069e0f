"""Command lines of inference servers."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor import sglang_backend
from agentrl.inference.supervisor.server_process import check_keys, server_command


@pytest.fixture(autouse=True)
def sglang_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_backend, "sglang_python", lambda: ["python"])


def command(model: ModelSection | None = None, **inference: Any) -> list[str]:
    return server_command(
        InferenceSection(**{"inference_backend": "sglang", **inference}),
        model or ModelSection(),
        model_path=Path("model"),
        port=30000,
        version=0,
        seed=0,
    )


@pytest.mark.parametrize("router_replay", [False, True])
def test_sglang_says_which_experts_it_chose_where_they_are_replayed(router_replay: bool) -> None:
    argv = command(ModelSection(router_replay=router_replay))
    assert [argv[0], Path(argv[1]).name] == ["python", "sglang_starter.py"]
    assert ("--enable-return-routed-experts" in argv) is router_replay


@pytest.mark.parametrize("colocated", [False, True])
def test_sglang_can_give_memory_up_where_the_trainer_needs_it(colocated: bool) -> None:
    assert ("--enable-memory-saver" in command(colocated=colocated)) is colocated


@pytest.mark.parametrize(
    ("own", "is_ordered"),
    [("", True), ("--schedule-policy lpm", False), ("--enable-metrics --tp 1", False)],
)
def test_sglang_takes_requests_in_the_order_of_their_groups(own: str, is_ordered: bool) -> None:
    argv = command(sglang_args=own)
    assert ("--enable-priority-scheduling" in argv) is is_ordered
    assert ("--priority-scheduling-preemption-threshold" in argv) is is_ordered


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_no_key_stands_among_a_servers_arguments(backend: str) -> None:
    argv = command(
        inference_backend=backend,
        inference_api_key=SecretStr("data-key"),
        inference_admin_key=SecretStr("admin-key"),
    )
    assert "-key" not in " ".join(argv)


def test_servers_for_other_machines_want_a_key_of_their_own_for_control() -> None:
    reachable = InferenceSection(inference_host="10.0.0.1", inference_api_key=SecretStr("data"))
    with pytest.raises(ConfigError, match="set AGENTRL_ADMIN_KEY as well"):
        check_keys(reachable)
    check_keys(reachable.model_copy(update={"inference_admin_key": SecretStr("admin")}))


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_sglang_makes_room_for_adapters_only_where_there_are_to_be_any(lora_rank: int) -> None:
    model = ModelSection(lora_rank=lora_rank, lora_target_modules=("q_proj", "v_proj"))
    line = " ".join(command(model))
    wanted = "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj"
    assert (wanted in line) == bool(lora_rank)
    assert ("lora" in line) == bool(lora_rank)


@pytest.mark.parametrize(
    ("used_mib", "fraction"),
    [
        (0, "0.5"),
        (10_000, "0.625"),  # of the 80 % that the trainer leaves
        (30_000, "0.95"),
    ],
)
def test_a_server_beside_a_trainer_gets_its_part_of_the_whole_gpu(
    used_mib: int, fraction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    lines = ["H100, 50000, 49000", f"H100, 50000, {used_mib}"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shared = command(share_gpus=True, inf_mem_ratio=0.5)
    assert shared[shared.index("--mem-fraction-static") + 1] == fraction
    assert "--enable-memory-saver" not in shared
    alone = command(inf_mem_ratio=0.5)
    assert alone[alone.index("--mem-fraction-static") + 1] == "0.5"


def test_an_engine_beside_a_trainer_keeps_to_its_part_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H100, 50000, 0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    weights = 300 << 20
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(weights)

    def caches(ratio: float) -> list[int]:
        section = InferenceSection(
            inference_backend="embedded", share_gpus=True, inf_mem_ratio=ratio
        )
        line = server_command(
            section, ModelSection(), model_path=tmp_path, port=1, version=0, seed=0
        )
        return [int(line[line.index(f"--{of}-cache-bytes") + 1]) for of in ("kv", "prefix")]

    assert sum(caches(0.5)) == (25_000 << 20) - weights
    assert caches(0.001) == [1 << 20, (1 << 20) // 8]

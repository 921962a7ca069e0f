"""What a start does with trainer and servers on the same GPUs, given what each needs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.config.shared_gpus import note_shortage, trainer_fraction
from agentrl.errors import ConfigError
from agentrl.launcher.cluster import gpu_sharing
from agentrl.launcher.cluster.gpu_placement import placed
from agentrl.launcher.cluster.gpu_sharing import GpuDemand, settled, sharing_by_default

GB = 10**9
ONE_GPU = "--inference_backend sglang --num_gpus 1"
DEMAND = GpuDemand(trainer_peak=20 * GB, server_weights=4 * GB, conversation=2 * GB)
Start = Callable[[str], tuple[RootConfig, list[str]]]


@pytest.fixture(autouse=True)
def demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nvidia-smi, and a measured demand."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_sharing, "imported", lambda _: lambda *_: DEMAND)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def started(flags: str) -> tuple[RootConfig, list[str]]:
        typed = parse_flags([*flags.split(), "--output_dir", str(tmp_path)])
        config, _ = placed(sharing_by_default(typed))
        return settled(typed, config, tmp_path)

    return started


def mode(config: RootConfig) -> str:
    inference = config.inference
    return {(True, False): "shared", (False, True): "turns"}.get(
        (inference.share_gpus, inference.colocated), "apart"
    )


def test_the_servers_get_what_the_trainers_step_leaves(start: Start) -> None:
    config, lines = start(f"{ONE_GPU} --share_gpus --gpu_memory_gb 80")
    # 80 GB less a tenth, the peak as torch's allocator holds it, and 1 GB of CUDA
    assert config.inference.inf_mem_ratio == pytest.approx((72 - 1.22 * 20 - 1) / 80, abs=0.001)
    assert lines == [
        "--share_gpus, --inf_mem_ratio 0.582: trainer 25.4 GB and server 46.6 GB (cache 42.6 GB) fit "
        "in the 80.0 GB of a GPU"
    ]
    # The trainer's limit leaves room for what was planned.
    assert trainer_fraction(config.inference.inf_mem_ratio) * 80 >= 1.22 * 20 + 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--gpu_memory_gb 30",
            "the trainer needs 25.4 GB .* a server 6.0 GB .* a GPU has 30.0 GB;",
        ),
        ("--gpu_memory_gb 80 --inf_mem_ratio 0.8", "--inf_mem_ratio can be 0.582 at most"),
        ("--gpu_memory_gb 80 --inf_mem_ratio 0.07", "--inf_mem_ratio 0.07 leaves it 5.6 GB"),
        ("", "memory of a GPU, .* unknown; give --gpu_memory_gb"),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(start: Start, flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--share_gpus: .*{problem}") as caught:
        start(f"{ONE_GPU} --share_gpus {flags}")
    assert str(caught.value).endswith("let both take turns with --colocated")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        ("--share_gpus --gpu_memory_gb 80", "ipc"),
        ("--gpu_memory_gb 80", "ipc"),
        ("--gpu_memory_gb 80 --weight_sync disk", "disk"),
        ("--gpu_memory_gb 80 --lora_rank 4", "disk"),
        ("--gpu_memory_gb 30", "disk"),
    ],
)
def test_a_server_on_the_trainers_gpu_gets_handles(start: Start, flags: str, way: str) -> None:
    config, _ = start(f"{ONE_GPU} {flags}")
    assert config.publish.weight_sync == way


def test_a_given_ratio_needs_no_known_memory(start: Start) -> None:
    config, lines = start(f"{ONE_GPU} --share_gpus --inf_mem_ratio 0.3")
    assert (mode(config), config.inference.inf_mem_ratio, lines) == ("shared", 0.3, [])


@pytest.mark.parametrize(
    ("flags", "expected", "reason"),
    [
        ("--gpu_memory_gb 80", "shared", "server share it .* trainer 25.4 GB and server 46.6 GB"),
        ("--gpu_memory_gb 30", "turns", "because the trainer needs 25.4 GB .* has 30.0 GB"),
        ("", "turns", "because the memory of a GPU, .* unknown"),
        ("--gpu_memory_gb 80 --inf_mem_ratio 0.8", "turns", "can be 0.582 at most"),
    ],
)
def test_one_gpu_is_shared_where_both_fit(
    start: Start, flags: str, expected: str, reason: str
) -> None:
    config, lines = start(f"{ONE_GPU} {flags}")
    assert mode(config) == expected
    (line,) = lines
    assert line.startswith("one GPU: trainer and server")
    assert re.search(reason, line)


@pytest.mark.parametrize(
    "flags",
    [
        "--gpu_memory_gb 30 --lora_rank 8",  # turns are not for adapters
        "--gpu_memory_gb 80 --weight_sync distributed",
        "--gpu_memory_gb 80 --num_processes 2",
        "--gpu_memory_gb 80 --colocated false",
    ],
)
def test_one_gpu_is_too_few_where_neither_way_goes(start: Start, flags: str) -> None:
    with pytest.raises(ConfigError, match=r"this machine has 1; .* --share_gpus or --colocated"):
        start(f"{ONE_GPU} {flags}")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{ONE_GPU} --colocated", "turns"),
        ("--inference_backend sglang --num_gpus 2 --gpu_memory_gb 80", "apart"),
        ("--num_gpus 1 --gpu_memory_gb 80", "apart"),
    ],
)
def test_nothing_is_chosen_where_nothing_is_open(start: Start, flags: str, expected: str) -> None:
    config, lines = start(flags)
    assert (mode(config), config.inference.inf_mem_ratio, lines) == (expected, 0.8, [])


def test_after_a_shortage_a_run_takes_turns_unless_told_otherwise(
    start: Start, tmp_path: Path
) -> None:
    note_shortage(tmp_path, "CUDA out of memory")
    config, lines = start(f"{ONE_GPU} --gpu_memory_gb 80")
    assert mode(config) == "turns"
    assert "(--colocated), because the trainer ran out of GPU memory beside the server" in lines[0]
    config, lines = start(f"{ONE_GPU} --gpu_memory_gb 80 --share_gpus")
    assert mode(config) == "shared"
    assert lines[0].startswith("warning: --share_gpus again, although the trainer ran out")
    config, _ = start(f"{ONE_GPU} --gpu_memory_gb 80 --fresh")
    assert mode(config) == "shared"

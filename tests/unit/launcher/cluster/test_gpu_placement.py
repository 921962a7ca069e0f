"""Which GPUs each process of a run gets, on machines that are said to have some."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.gpu_placement import GpuMap, placed
from agentrl.launcher.cluster.local_cluster import LocalCluster
from agentrl.runtime.gpus import machine_gpus, visible_gpus

SGLANG = "--inference_backend sglang"
FAKE_SGLANG = """#!/bin/bash
# Stands for SGLang's interpreter: writes down how it was started, and serves nothing.
port=$(sed 's/.*--port \\([0-9]*\\).*/\\1/' <<< "$*")
{ echo "$CUDA_VISIBLE_DEVICES"; echo "$*"; } > "$(dirname "$0")/.$port"
mv "$(dirname "$0")/.$port" "$(dirname "$0")/started.$port"
exec sleep 600
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that comes first; no GPU is hidden."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def plan(flags: str, *, trains: bool = True) -> tuple[dict[str, Any], GpuMap]:
    config, gpus = placed(parse_flags(flags.split()), trains=trains)
    trainer, inference = config.trainer, config.inference
    counts = {"ranks": trainer.num_processes, "servers": inference.num_inference_servers}
    return counts, gpus


@pytest.mark.parametrize(
    ("flags", "trainer", "servers"),
    [
        # the trainer takes the first, the servers what it leaves
        (f"{SGLANG} --num_gpus 2", (0,), [(1,)]),
        (f"{SGLANG} --num_gpus 4", (0,), [(1,), (2,), (3,)]),
        (f"{SGLANG} --num_gpus 8 --num_processes 4", (0, 1, 2, 3), [(4,), (5,), (6,), (7,)]),
        (f"{SGLANG} --num_gpus 8 --num_inference_servers 2", (0,), [(1,), (2,)]),
        # tensor-parallel groups stay together; what fills none stays free
        (f"{SGLANG} --num_gpus 8 --inf_tp_size 2", (0,), [(1, 2), (3, 4), (5, 6)]),
        (f"{SGLANG} --num_gpus 4 --sglang_args=--pp-size=2", (0,), [(1, 2)]),
        (f"{SGLANG} --num_gpus 3 --sglang_args=--dp=2", (0,), [(1, 2)]),
        (f"{SGLANG} --num_gpus 4 --trainer_gpus 1", (1,), [(0,), (2,), (3,)]),
        # named
        (
            f"{SGLANG} --num_gpus 8 --trainer_gpus 0-3 --inference_gpus 4-7 --inf_tp_size 2",
            (0, 1, 2, 3),
            [(4, 5), (6, 7)],
        ),
        (f"{SGLANG} --num_gpus 8 --trainer_gpus 0,2,5 --inference_gpus 7", (0, 2, 5), [(7,)]),
        (f"{SGLANG} --num_gpus 8 --inference_gpus 0-5 --num_processes 2", (6, 7), None),
        # shared
        (f"{SGLANG} --num_gpus 1 --colocated", (0,), [(0,)]),
        (f"{SGLANG} --num_gpus 8 --colocated --num_processes 4 --inf_tp_size 2", None, None),
        (f"{SGLANG} --num_gpus 8 --colocated --inference_gpus 4-7 --num_processes 4", None, None),
        (f"{SGLANG} --num_gpus 1 --share_gpus", (0,), [(0,)]),
        (f"{SGLANG} --num_gpus 4 --share_gpus --trainer_gpus 2 --inference_gpus 2", (2,), [(2,)]),
        (f"{SGLANG} --num_gpus 8 --share_gpus --num_processes 4 --inf_tp_size 2", None, None),
        # the embedded engine, where a flag names GPUs for it
        ("--num_gpus 2 --inference_gpus 1", (0,), [(1,)]),
        ("--num_gpus 1 --share_gpus", (0,), [(0,)]),
        ("--num_gpus 1 --colocated", (0,), [(0,)]),
        # servers that need none
        ("--num_gpus 2", (0,), []),
        (f"{SGLANG} --num_gpus 2 --inference_urls http://127.0.0.1:1", (0,), []),
        (f"{SGLANG} --num_gpus 2 --enable_sampling false", (0,), []),
    ],
)
def test_ranks_and_servers_get_gpus_of_their_own(
    flags: str, trainer: tuple[int, ...] | None, servers: list[tuple[int, ...]] | None
) -> None:
    counts, gpus = plan(flags)
    assert len(gpus.trainer) == counts["ranks"]
    assert len(gpus.servers) == (counts["servers"] if gpus.servers else 0)
    assert trainer is None or gpus.trainer == trainer
    assert servers is None or list(gpus.servers) == servers
    used = [gpu for group in gpus.servers for gpu in group]
    assert len(set(used)) == len(used)
    if "--colocated" in flags or "--share_gpus" in flags:
        assert sorted(used) == sorted(gpus.trainer)
    else:
        assert set(used).isdisjoint(gpus.trainer)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{SGLANG} --num_gpus 1", "need 2 GPUs, .* has 1; .* --share_gpus or --colocated"),
        (f"{SGLANG} --num_gpus 8 --inf_tp_size 8", "1 server.* of 8 GPU.* need 9 GPUs"),
        (f"{SGLANG} --num_gpus 4 --num_processes 4", "--num_processes"),
        (f"{SGLANG} --num_gpus 8 --num_inference_servers 8", "need 9 GPUs, and this machine has 8"),
        ("--num_gpus 1 --num_processes 2", "2 trainer ranks need one GPU each, .* has 1"),
        (f"{SGLANG} --num_gpus 0", "no GPU found.*--inference_urls"),
        (f"{SGLANG} --num_gpus 4 --trainer_gpus 0-7", "GPU 4-7 does not exist"),
        (f"{SGLANG} --num_gpus 4 --inference_gpus 4", "GPU 4 does not exist; .* numbered from 0"),
        ("--num_gpus 0 --trainer_gpus 0", "--trainer_gpus 0: no GPU found"),
        (f"{SGLANG} --num_gpus 8 --colocated --inf_tp_size 2", "--colocated: 1 trainer rank"),
        (f"{SGLANG} --num_gpus 8 --share_gpus --inf_tp_size 2", "--share_gpus: 1 trainer rank"),
        (
            f"{SGLANG} --num_gpus 8 --colocated --num_processes 4 --num_inference_servers 2",
            "--colocated: 4 trainer rank.* must use the same number",
        ),
    ],
)
def test_too_few_gpus_are_refused_in_one_line(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        plan(flags)
    assert "\n" not in str(caught.value)


def test_the_map_says_who_shares_a_gpu() -> None:
    _, gpus = plan(f"{SGLANG} --num_gpus 1 --share_gpus")
    assert dict(gpus.rows()) == {
        "trainer": "rank 0 on GPU 0",
        "server 0": "GPU 0, shared with the trainer",
        "others": "no GPU",
    }


def test_an_evaluation_has_all_gpus_for_its_servers() -> None:
    counts, gpus = plan(f"{SGLANG} --num_gpus 4 --inf_tp_size 2 --num_processes 4", trains=False)
    assert (gpus.trainer, gpus.servers) == ((), ((0, 1), (2, 3)))
    assert counts["servers"] == 2


def test_gpus_are_counted_among_those_that_this_process_may_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5e1f,6,-1,7")
    _, gpus = plan(f"{SGLANG} --inf_tp_size 2")
    assert gpus.environment(gpus.trainer) == {"CUDA_VISIBLE_DEVICES": "4"}
    assert gpus.environment(gpus.servers[0]) == {"CUDA_VISIBLE_DEVICES": "GPU-5e1f,6"}
    assert dict(gpus.rows())["server 0"] == "GPUs 1-2 (GPU-5e1f,6)"


@pytest.mark.parametrize("shown", ["", "-1"])
def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus() == ()
    assert plan("")[1].environment([]) == {}


def test_gpus_are_those_of_nvidia_smi(machine: Path) -> None:
    lines = ["NVIDIA H100 80GB HBM3, 81559, 12", "NVIDIA H100 80GB HBM3, 81559, [N/A]"]
    program(machine, "nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    found = machine_gpus()
    assert [(gpu.name, gpu.total_mib, gpu.used_mib) for gpu in found] == [
        ("NVIDIA H100 80GB HBM3", 81559, 12),
        ("NVIDIA H100 80GB HBM3", 81559, None),
    ]
    assert visible_gpus() == ("0", "1")
    program(machine, "nvidia-smi", "#!/bin/sh\necho 'driver mismatch'\nexit 9\n")
    assert visible_gpus() == ()


async def test_children_see_their_own_gpus_alone(machine: Path, tmp_path: Path) -> None:
    """The real launcher and supervisors, with an interpreter of SGLang that is none."""
    python = program(machine, "fake_python", FAKE_SGLANG)
    program(machine, "sglang", f"#!{python}\n")
    config, gpus = placed(
        build_config(
            {
                "run_name": "map",
                "output_dir": tmp_path / "out",
                "logs_dir": tmp_path / "logs",
                "mongo_data_dir": tmp_path / "mongo",
                "mongo_port": 0,
                "inference_backend": "sglang",
                "inf_tp_size": 2,
                "num_gpus": 8,
                "trainer_gpus": "0-2",
                "inference_gpus": "4-7",
                "num_samplers": 1,
            }
        )
    )
    async with LocalCluster(config, gpus=gpus) as cluster:
        await cluster.open_store()
        cluster.write_config()
        await cluster.start_servers()
        trainer = await cluster.start_trainer()
        seen = environment_of(trainer.pid)
        async with asyncio.timeout(60):
            while len(started := sorted(machine.glob("started.*"))) < 2:
                await asyncio.sleep(0.05)
    assert seen["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    shown, commands = zip(*(path.read_text().splitlines() for path in started), strict=True)
    assert set(shown) == {"4,5", "6,7"}
    assert all("--tp-size 2" in command for command in commands)
    written = json.dumps(cluster.config.inference.inference_gpus)
    assert written == "[4, 5, 6, 7]"


def environment_of(pid: int | None) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)

"""`agentrl run` on a machine that is said to have eight GPUs: what every process sees of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.demo_run import ROOT, run_command
from support.patience import PATIENCE

NAME, TOTAL_MIB, USED_MIB = "NVIDIA H100", 81559, 4
SMI = "#!/bin/sh\n" + f"echo '{NAME}, {TOTAL_MIB}, {USED_MIB}'\n" * 8
PROCESSES = {
    "sample": {"2,3"},
    "serve": {"4,5", "6,7"},
    "server": {"4,5", "6,7"},
    "rank 0": {"0,1"},
    "rank 1": {"0,1"},
}


def kind_of(process: psutil.Process) -> str | None:
    """Which of `PROCESSES` it is."""
    line, rank = process.cmdline(), process.environ().get("RANK")
    if "--tp-size" in line or "serving" in line:
        return "server"
    if rank is not None and "train" in line:
        return f"rank {rank}"
    return next((word for word in ("sample", "serve") if word in line), None)


def look(run: psutil.Process, seen: dict[str, set[str]]) -> None:
    for child in run.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (kind := kind_of(child)) is not None:
                seen.setdefault(kind, set()).add(child.environ()["CUDA_VISIBLE_DEVICES"])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="environments are looked up as Linux has them")
def test_every_process_sees_its_own_gpus(tmp_path: Path) -> None:
    programs = {
        "nvidia-smi": SMI,
        # Stands for SGLang's interpreter; it never serves.
        "python_of_sglang": "#!/bin/bash\nexec -a serving sleep 600\n",
        "sglang": f"#!{tmp_path}/python_of_sglang\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = run_command(
        tmp_path,
        inference_backend="sglang",
        inf_tp_size=2,
        trainer_gpus="0-1",
        inference_gpus="4-7",
        num_samplers=1,
        inference_port=34200,
    )
    seen: dict[str, set[str]] = {}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        try:
            deadline = time.monotonic() + PATIENCE
            while seen != PROCESSES and run.poll() is None and time.monotonic() < deadline:
                look(psutil.Process(run.pid), seen)
                time.sleep(0.1)
        finally:
            run.send_signal(signal.SIGTERM)
            time.sleep(1)
            run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=60)
    assert seen == PROCESSES, output
    # Notes may come before the map, and a line on checks that take long.
    lines = output.splitlines()
    first = lines[next(n for n, line in enumerate(lines) if line.lstrip().startswith("trainer")) :][
        :4
    ]
    assert [line.split(maxsplit=1)[0] for line in first] == [
        "trainer",
        "server",
        "server",
        "others",
    ]
    assert "ranks 0-1 on GPUs 0-1" in first[0]

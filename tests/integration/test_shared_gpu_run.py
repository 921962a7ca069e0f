"""`agentrl run` on one GPU that trainer and server share, until the trainer runs out of its memory.

No GPU is needed: the trainer computes on the CPU, and SGLang's interpreter starts the embedded engine.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.demo_run import ROOT, logs, run_command
from support.versions import check_versions

from agentrl.schema import Record
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_STEPS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

INTERPRETER = f"""#!{sys.executable}
# Stands for SGLang's interpreter: writes down its arguments, and serves with the embedded engine.
import os, sys
with open(os.path.join(os.path.dirname(__file__), "started"), "a") as log:
    log.write(" ".join(sys.argv[2:]) + chr(10))
taken = ("--model-path", "--host", "--port", "--weight-version", "--max-running-requests")
words = [word for flag in taken for word in (flag, sys.argv[sys.argv.index(flag) + 1])]
engine = [sys.executable, "-P", "-m", "agentrl.plugins.engine", *words, "--num-threads", "1"]
os.execv(sys.executable, engine)
"""
EXHAUSTED = """
# Imported when Python starts: in the trainer's second step, the learner finds no memory.
import os, sys
if "train" in sys.orig_argv and "EXHAUSTED_STEP" in os.environ:
    import torch
    from agentrl.trainer.learner.learner import Learner

    def passes(learner, *arguments, original=Learner.forward_backward, **settings):
        learner.asked = getattr(learner, "asked", 0) + 1
        if learner.asked == int(os.environ["EXHAUSTED_STEP"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        return original(learner, *arguments, **settings)

    Learner.forward_backward = passes
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = run_command(
        folder,
        inference_backend="sglang",
        num_gpus=1,
        gpu_memory_gb=80,
        max_steps=NUM_STEPS,
        keep_policies=20,
        inference_port=34200,
    )
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(folder / "bin")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | paths | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def started(folder: Path) -> list[str]:
    return (folder / "bin/started").read_text().splitlines()


async def records_of(folder: Path) -> list[Record]:
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            records = [record async for record in store.records.find(split="train")]
            played = [record for record in records if record.turns]
            turns = [await store.turns.of_record(record.id) for record in played]
    assert check_versions(turns, folder / "output/policy") > 100
    return records


def test_a_run_shares_its_gpu_until_that_is_too_small_and_then_takes_turns(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = program(tmp_path / "bin/fake_python", INTERPRETER)
    program(tmp_path / "bin/sglang", f"#!{python}\n")
    (tmp_path / "bin/sitecustomize.py").write_text(EXHAUSTED)

    first = run(tmp_path, EXHAUSTED_STEP="2")
    said = first.stdout + first.stderr
    assert "one GPU: trainer and server share it (--share_gpus), --inf_mem_ratio 0." in said
    assert "server 0     GPU 0, shared with the trainer" in said
    assert first.returncode == 1, said + logs(tmp_path)
    assert (
        "beside the server (--share_gpus): CUDA out of memory. Tried to allocate 2.00 GiB; " in said
    )
    assert "restart" not in said
    (arguments,) = started(tmp_path)
    assert "--mem-fraction-static 0.8" in arguments
    assert "--enable-memory-saver" not in arguments

    second = run(tmp_path)
    said = second.stdout + second.stderr
    assert second.returncode == 0, said + logs(tmp_path)
    assert "one GPU: trainer and server take turns (--colocated), because the trainer ran" in said
    _, arguments = started(tmp_path)
    assert "--enable-memory-saver" in arguments
    metrics = (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    records = asyncio.run(records_of(tmp_path))
    assert not [record for record in records if record.status == "failed"]

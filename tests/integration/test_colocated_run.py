"""`agentrl run --colocated`: the servers' memory is the trainer's while it computes."""

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.demo_run import ROOT, config_path, database_uri, logs, run_command
from support.versions import check_versions

from agentrl.schema import DispatchedSamplingTask, Record
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

logger = logging.getLogger(__name__)

NUM_STEPS = 3
WIDTH = 12_288
"""Hidden units of a layer's MLP: so many that memory can be told from noise."""
POLL_SECONDS = 0.02

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is looked up as Linux counts it"),
    pytest.mark.slow,
    pytest.mark.timeout(420),
]


def widened_demo_model(target: Path) -> int:
    """Write the demo's model with hidden units that add nothing; return the bytes of its weights."""
    shutil.copytree(ROOT / "assets/demo/model", target)
    config = json.loads((target / "config.json").read_text())
    config["intermediate_size"] = WIDTH
    (target / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        rows, columns = (tensor.shape[0], tensor.shape[-1])
        if "gate_proj" in name or "up_proj" in name:
            tensor = torch.cat([tensor, torch.zeros(WIDTH - rows, columns)])
        elif "down_proj" in name:
            tensor = torch.cat([tensor, torch.zeros(rows, WIDTH - columns)], dim=1)
        tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@dataclass
class Watched:
    """What was seen of a run's engine."""

    weight_bytes: int
    pids: set[int] = field(default_factory=set)
    resident: list[tuple[bool, int]] = field(default_factory=list)
    """Whether the trainer had the device, and how many bytes of the engine were in memory then."""
    turns: list[list[DispatchedSamplingTask]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def engine_of(run: psutil.Process) -> psutil.Process | None:
    for child in run.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "agentrl.plugins.engine" in child.cmdline():
                return child
    return None


async def watch(folder: Path, run: "subprocess.Popen[str]", seen: Watched) -> None:
    """Note the engine's memory until the run ends."""
    while run.poll() is None and not config_path(folder).exists():
        await asyncio.sleep(POLL_SECONDS)
    async with TrajectoryStore.connect(database_uri(folder)) as store:
        # The database goes soon after the trainer's last word.
        while run.poll() is None and not await is_completed(store):
            with contextlib.suppress(psutil.NoSuchProcess):
                await look(store, psutil.Process(run.pid), seen)
            await asyncio.sleep(POLL_SECONDS)


async def is_completed(store: TrajectoryStore) -> bool:
    run = await store.runs.get()
    return run is not None and run.status == "completed"


async def look(store: TrajectoryStore, run: psutil.Process, seen: Watched) -> None:
    engine = engine_of(run)
    services = await store.services.all()
    if engine is None or not services:
        return
    # Falling asleep and waking take a moment: only what is the same before and after counts.
    before = (services[0].status, await store.trainer_leases.holder_has_device())
    resident = engine.memory_info().rss
    after = ((await store.services.all())[0].status, await store.trainer_leases.holder_has_device())
    seen.pids.add(engine.pid)
    if before == after and before in (("up", False), ("asleep", True)):
        seen.resident.append((before[1], resident))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return asyncio.run(watched_run(tmp_path_factory.mktemp("colocated")))


async def watched_run(folder: Path) -> Watched:
    seen = Watched(widened_demo_model(folder / "model"))
    command = run_command(
        folder,
        model_name_or_path=folder / "model",
        colocated="true",
        max_steps=NUM_STEPS,
        keep_policies=20,
        inference_port=34000,
    )
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        try:
            watching = asyncio.create_task(watch(folder, run, seen))
            output, _ = await asyncio.to_thread(run.communicate, timeout=360)
            await watching
        finally:
            if run.poll() is None:
                run.terminate()
    assert run.returncode == 0, output + logs(folder)
    metrics = (folder / "output/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            seen.records = [record async for record in store.records.find(split="train")]
            played = [record for record in seen.records if record.turns]
            seen.turns = [await store.turns.of_record(record.id) for record in played]
    assert check_versions(seen.turns, folder / "output/policy") > 100
    return seen


def test_the_engine_has_no_weights_while_the_trainer_computes(watched: Watched) -> None:
    turns = [
        (is_asleep, [resident for _, resident in looks])
        for is_asleep, looks in groupby(watched.resident, key=lambda look: look[0])
    ]
    # A server is said to be asleep a moment before it is.
    fell = [
        awake[-1] - min(asleep) for (_, awake), (is_asleep, asleep) in pairwise(turns) if is_asleep
    ]
    logger.info(
        "weights %d MiB; the engine's resident memory fell by %s MiB",
        watched.weight_bytes >> 20,
        [size >> 20 for size in fell],
    )
    assert len(fell) == NUM_STEPS
    assert min(fell) >= 0.9 * watched.weight_bytes


def test_no_rollout_is_lost_to_a_turn_of_the_trainer(watched: Watched) -> None:
    assert len(watched.pids) == 1
    assert {record.attempt for record in watched.records if record.turns} == {1}
    assert not [record for record in watched.records if record.status == "failed"]


def test_generations_go_on_after_the_trainers_turn(watched: Watched) -> None:
    spans = [turn.version_spans for turns in watched.turns for turn in turns]
    assert any(len(versions) > 1 for versions in spans)
    assert {span.version for versions in spans for span in versions} >= set(range(NUM_STEPS))


async def test_several_ranks_and_engines_take_turns(tmp_path: Path) -> None:
    command = run_command(
        tmp_path,
        colocated="true",
        num_processes=2,
        num_inference_servers=2,
        trainer_threads=1,
        inference_threads=1,
        max_steps=2,
        inference_port=34100,
    )
    seen: set[tuple[str, ...]] = set()
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        try:
            while run.poll() is None and not config_path(tmp_path).exists():
                await asyncio.sleep(POLL_SECONDS)
            async with TrajectoryStore.connect(database_uri(tmp_path)) as store:
                while run.poll() is None and not await is_completed(store):
                    before = await store.trainer_leases.holder_has_device()
                    statuses = tuple(service.status for service in await store.services.all())
                    if before and await store.trainer_leases.holder_has_device():
                        seen.add(statuses)
                    await asyncio.sleep(POLL_SECONDS)
            output, _ = await asyncio.to_thread(run.communicate, timeout=360)
        finally:
            if run.poll() is None:
                run.terminate()
    assert run.returncode == 0, output + logs(tmp_path)
    assert ("asleep", "asleep") in seen
    metrics = (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            records = [record async for record in store.records.find(split="train")]
    assert {record.attempt for record in records if record.turns} == {1}
    assert not [record for record in records if record.status == "failed"]

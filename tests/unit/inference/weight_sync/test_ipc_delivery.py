"""Handles of weights to another process, and files where a server takes no handles."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from harness.processes import engine_process
from safetensors.torch import load_file, save_file
from support.engines import check_serves

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.broadcast import Bucket, in_buckets
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.ipc_delivery import IpcDelivery
from agentrl.schema import InferenceService, Policy, Run
from agentrl.store import TrajectoryStore

BUCKET_BYTES = 50_000
RECEIVER = Path(__file__).parents[3] / "support/tensor_receiver.py"


@pytest.fixture(autouse=True)
def _shared_by_name() -> Iterator[None]:
    """By default, torch passes descriptors, which only its own child processes can ask for."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture
def receiver() -> Iterator[str]:
    argv = [sys.executable, str(RECEIVER)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def wants_files(publisher: PolicyPublisher) -> bool:
    return publisher.needs_files


class Trainer:
    """Has weights in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    async def send(self, _max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            for bucket in in_buckets(([item] for item in self.tensors.items()), BUCKET_BYTES):
                sink(bucket)

        await asyncio.to_thread(work)


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


async def test_another_process_reads_the_trainers_memory(
    receiver: str, models: tuple[Path, Path]
) -> None:
    trainer = Trainer(load_file(models[0] / "model.safetensors"))
    trainer.tensors["lm_head.bfloat16"] = torch.randn(8, 4).bfloat16().requires_grad_()
    expected = {name: digest(tensor.detach()) for name, tensor in trainer.tensors.items()}
    delivery = IpcDelivery(PublishSection(weight_sync="ipc"), trainer.send)
    outcomes: dict[str, float | InferenceError] = {}

    async def on_outcome(name: str, outcome: float | InferenceError) -> None:
        outcomes[name] = outcome

    async with SGLangClient(receiver) as client:
        await delivery.deliver(
            Policy(version=3, path="none", num_bytes=0), {"0": client}, on_outcome
        )

    async with httpx.AsyncClient(trust_env=False) as http:
        got = (await http.get(f"{receiver}/weights")).json()
    assert isinstance(outcomes["0"], float)
    assert not delivery.needs_files
    assert got["weights"] == expected
    assert len(got["labels"]) > 2
    assert got["labels"] == [None] * (len(got["labels"]) - 1) + ["3"]
    opened = ["/pause_generation", "/update_weight_version", "/begin_weight_update"]
    assert got["calls"][:3] == opened
    assert got["calls"][-2:] == ["/end_weight_update", "/continue_generation"]


async def test_a_server_that_takes_no_handles_gets_the_next_version_from_files(
    store: TrajectoryStore, tmp_path: Path, models: tuple[Path, Path]
) -> None:
    await store.runs.create(Run(name=store.database_name))
    trainer = Trainer(load_file(models[1] / "model.safetensors"))
    section = PublishSection(weight_sync="ipc")
    publisher = PolicyPublisher(
        store,
        tmp_path,
        publish=section,
        inference=InferenceSection(),
        delivery=IpcDelivery(section, trainer.send),
    )

    async def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        for file in models[1].iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        save_file(trainer.tensors, directory / "model.safetensors", metadata={"format": "pt"})

    with engine_process(models[0]) as url:
        service = InferenceService(id="0", base_url=url, backend="embedded", model_path="m")
        await store.services.register(service)
        assert not wants_files(publisher)
        assert (await publisher.announce(1, write)).failed.keys() == {"0"}
        await publisher.settle()
        assert wants_files(publisher)

        await store.services.set_status("0", status="up")
        await write(publisher.directory(2))
        assert (await publisher.announce(2)).updated == ("0",)
        await publisher.settle()
        await check_serves(url, publisher.directory(2), 2)

"""Changed values to an embedded engine in a process of its own."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import engine_process
from safetensors.torch import load_file, save_file
from support.engines import check_serves

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.broadcast import Bucket, in_buckets
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.delta_delivery import DeltaDelivery
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore

BUCKET_BYTES = 50_000


@pytest.fixture(scope="module")
def url(models: tuple[Path, Path]) -> Iterator[str]:
    """An engine, which later tests find with whatever weights earlier ones gave it."""
    with engine_process(models[0]) as served:
        yield served


class Trainer:
    """Has weights in memory, and changes some."""

    def __init__(self, checkpoint: Path) -> None:
        self.tensors = load_file(checkpoint / "model.safetensors")
        self._files = checkpoint

    async def send(self, _max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            for bucket in in_buckets(([item] for item in self.tensors.items()), BUCKET_BYTES):
                sink(bucket)

        await asyncio.to_thread(work)

    def step(self) -> None:
        """Change a few values of every tensor."""
        for tensor in self.tensors.values():
            tensor.view(-1)[:: max(50, tensor.numel() // 20)] *= 1.5

    async def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        for file in self._files.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})


async def test_a_server_gets_what_changed_and_with_another_version_everything(
    store: TrajectoryStore, tmp_path: Path, url: str, models: tuple[Path, Path]
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.services.register(
        InferenceService(id="0", base_url=url, backend="embedded", model_path="m")
    )
    trainer = Trainer(models[1])
    section = PublishSection(weight_sync="delta")
    delivery = DeltaDelivery(section, trainer.send)
    publisher = PolicyPublisher(
        store, tmp_path, publish=section, inference=InferenceSection(), delivery=delivery
    )

    async def publish(version: int, *, writes_first: bool) -> bool:
        directory = publisher.directory(version)
        if writes_first:
            await trainer.write(directory)
        report = await publisher.announce(version, None if writes_first else trainer.write)
        await publisher.settle()
        if report.updated:
            await check_serves(url, directory, version)
        return bool(report.updated)

    assert await publish(1, writes_first=False)
    assert delivery.size is not None
    assert delivery.size.sent_share == 1
    trainer.step()
    assert await publish(2, writes_first=False)
    assert 0 < delivery.size.sent_share < 0.05
    assert delivery.size.num_bytes < 0.2 * delivery.size.full_bytes

    async with SGLangClient(url) as client:
        await client.update_weight_version("1")
    trainer.step()
    assert await publish(3, writes_first=True)

    async with SGLangClient(url) as client:
        await client.update_weight_version("2")
    trainer.step()
    assert not await publish(4, writes_first=False)
    (lost,) = await store.services.all()
    assert lost.status == "down"
    assert "relative to version 3, but the weights are those of 2" in str(lost.error)
    assert [path.name for path in tmp_path.glob("*-delta")] == ["000004-delta"]


async def test_weights_that_differ_from_what_was_published_are_not_served(
    tmp_path: Path, url: str, models: tuple[Path, Path]
) -> None:
    async with SGLangClient(url) as client:
        await client.update_weights_from_disk(str(models[0]), weight_version="7")
        trainer = Trainer(models[1])
        delivery = DeltaDelivery(PublishSection(weight_sync="delta"), trainer.send)
        await delivery._write(tmp_path / "whole", "7")
        trainer.step()
        await delivery._write(tmp_path / "delta", "8")
        with pytest.raises(InferenceError, match="its checksum does not match"):
            await client.update_weights_from_disk(
                str(tmp_path / "delta"), weight_version="8", load_format="delta"
            )
        assert (await client.model_info()).weight_version == -1
        await client.update_weights_from_disk(str(models[0]), weight_version="9")
    await check_serves(url, models[0], 9)

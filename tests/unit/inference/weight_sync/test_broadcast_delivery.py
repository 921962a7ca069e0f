"""Weights broadcast to embedded engines in processes of their own, over gloo."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness.processes import engine_process
from safetensors.torch import load_file
from support.engines import check_serves, make_model
from transformers import AutoModelForCausalLM

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.broadcast import Bucket, in_buckets
from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery
from agentrl.inference.weight_sync.memory_delivery import SendWeights, gathered_buckets
from agentrl.inference.wire import MIXED_LABEL, parse_result
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore

BUCKET_BYTES = 50_000
BOUND_SECONDS = 14.0


@pytest.fixture(scope="module")
def urls(models: tuple[Path, Path]) -> Iterator[list[str]]:
    """Two engines, which later tests find with whatever weights earlier ones gave them.

    The last test to use them kills the second one.
    """
    with engine_process(models[0]) as kept, engine_process(models[0], is_sacrificed=True) as other:
        yield [kept, other]


def process_on(url: str) -> psutil.Process:
    port = int(url.rpartition(":")[2])
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port for c in child.net_connections() if c.status == "LISTEN"):
            return child
    raise AssertionError(f"nobody listens on {port}")


class Trainer:
    """Sends a checkpoint's tensors as a trainer would, and does something in the middle."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors = load_file(checkpoint / "model.safetensors")
        self.in_the_middle: Callable[[], None] = lambda: None

    async def send(self, _max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            groups = ([item] for item in self._tensors.items())
            for number, bucket in enumerate(in_buckets(groups, BUCKET_BYTES)):
                if number == 4:
                    self.in_the_middle()
                    self.in_the_middle = lambda: None
                sink(bucket)

        await asyncio.to_thread(work)


async def publisher_of(
    store: TrajectoryStore, root: Path, urls: list[str], send: SendWeights, **publish: object
) -> PolicyPublisher:
    await store.runs.create(Run(name=store.database_name))
    for number, url in enumerate(urls):
        await store.services.register(
            InferenceService(id=str(number), base_url=url, backend="embedded", model_path="m")
        )
    section = PublishSection(weight_sync="distributed", **publish)
    return PolicyPublisher(
        store,
        root,
        publish=section,
        inference=InferenceSection(),
        delivery=BroadcastDelivery(section, send, "gloo"),
    )


async def test_all_servers_serve_what_was_broadcast_and_files_follow(
    store: TrajectoryStore,
    tmp_path: Path,
    urls: list[str],
    models: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    publisher = await publisher_of(store, tmp_path, urls, Trainer(models[1]).send)
    is_released = asyncio.Event()

    async def write(directory: Path) -> None:
        await is_released.wait()
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"weights")

    for version in (1, 2):
        is_released.clear()
        report = await publisher.announce(version, write)
        assert (sorted(report.updated), report.failed) == (["0", "1"], {})
        policy = await store.policies.latest()
        assert policy is not None
        assert (policy.version, policy.is_written, policy.num_bytes) == (version, False, 0)
        phases = "form .* open .* gather .* send .* install .* close"
        assert re.search(f"version {version} was delivered to 2 servers: {phases}", caplog.text)
        for url in urls:
            await check_serves(url, models[1], version)
        is_released.set()
        await publisher.settle()
        policy = await store.policies.latest()
        assert policy is not None
        assert (policy.is_written, policy.num_bytes) == (True, len(b"weights"))


@pytest.mark.parametrize("takes_stacks", [True, False])
async def test_experts_travel_as_one_tensor_to_engines_and_one_by_one_to_others(
    store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_stacks: bool
) -> None:
    names: list[str] = []
    update, info = SGLangClient.update_weights_from_distributed, SGLangClient.server_info

    async def noted(client: SGLangClient, bucket: Bucket, **keywords: Any) -> None:
        names.extend(bucket.names)
        await update(client, bucket, **keywords)

    async def of_another(client: SGLangClient) -> dict[str, object]:
        return {"version": (await info(client))["version"], "tp_size": 1}

    monkeypatch.setattr(SGLangClient, "update_weights_from_distributed", noted)
    if not takes_stacks:
        monkeypatch.setattr(SGLangClient, "server_info", of_another)
    first, second = (make_model(tmp_path / str(seed), seed=seed, num_experts=4) for seed in (1, 2))
    new = AutoModelForCausalLM.from_pretrained(second).state_dict()
    del new["lm_head.weight"]  # tied

    async def send(max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            for bucket in in_buckets(([entry] for entry in new.items()), max_bytes):
                sink(bucket)

        await asyncio.to_thread(work)

    with engine_process(first) as url:
        publisher = await publisher_of(store, tmp_path, [url], send)
        report = await publisher.announce(1)
        assert report.failed == {}
        await check_serves(url, second, 1)
        await publisher.settle()
    experts = {name for name in names if ".experts." in name}
    assert all(name.endswith(("gate_up_proj", "down_proj")) == takes_stacks for name in experts)
    assert len(experts) == (4 if takes_stacks else 2 * 4 * 3)


async def test_a_server_that_is_gone_before_costs_no_attempt(
    store: TrajectoryStore, tmp_path: Path, urls: list[str], models: tuple[Path, Path]
) -> None:
    trainer = Trainer(models[1])
    num_sent = 0

    async def counted(max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        nonlocal num_sent
        num_sent += 1
        await trainer.send(max_bytes, sink)

    publisher = await publisher_of(store, tmp_path, [urls[0], "http://127.0.0.1:9"], counted)
    report = await publisher.announce(3)
    await publisher.settle()
    assert (report.updated, list(report.failed), num_sent) == (("0",), ["1"], 1)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL]
)
async def test_a_server_that_is_lost_in_the_middle_holds_nobody_longer_than_the_bound(
    store: TrajectoryStore,
    tmp_path: Path,
    urls: list[str],
    models: tuple[Path, Path],
    number: signal.Signals,
) -> None:
    trainer, good = Trainer(models[0]), urls[0]
    stopped = engine_process(models[0], is_sacrificed=True)
    with nullcontext(urls[1]) if number == signal.SIGKILL else stopped as bad:
        process = process_on(bad)
        trainer.in_the_middle = lambda: os.kill(process.pid, number)
        publisher = await publisher_of(
            store, tmp_path, [good, bad], trainer.send, publish_timeout_seconds=BOUND_SECONDS
        )
        started = time.monotonic()
        report = await publisher.announce(2)
        assert time.monotonic() - started < BOUND_SECONDS + 4
        assert (report.updated, list(report.failed)) == (("0",), ["1"])
        services = {service.id: service for service in await store.services.all()}
        assert (services["0"].status, services["0"].policy_version) == ("up", 2)
        assert services["1"].status == "down"
        await check_serves(good, models[0], 2)
        await publisher.settle()


async def test_nothing_sampled_with_weights_of_two_versions_is_used() -> None:
    body = {
        "output_ids": [1, 2],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.1, 1, None], [-0.2, 2, None]],
            "weight_versions": [
                {"version": "1", "start": 0, "end": 1},
                {"version": MIXED_LABEL, "start": 1, "end": 2},
            ],
        },
    }
    with pytest.raises(ServerRefused, match="two versions") as refused:
        parse_result(body, "server")
    assert refused.value.is_transient


async def test_gathering_ends_when_nobody_takes_the_weights_any_more() -> None:
    async def send(_: int, put: Callable[[Bucket], None]) -> None:
        def work() -> None:
            for number in range(4):
                put(Bucket(((str(number), torch.zeros(1)),), is_last=number == 3))

        await asyncio.to_thread(work)

    before = asyncio.all_tasks()
    async with aclosing(gathered_buckets(send, 1 << 20, on_cpu=True)) as buckets:
        await anext(buckets)
        (gathering,) = asyncio.all_tasks() - before
    await asyncio.wait_for(gathering, 60)

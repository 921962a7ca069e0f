"""New weights over a process group, as publishers send them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.engines import FIRST, SECOND, Oracle, Served, prompt, request
from support.in_flight import in_flight, split_at_update

from agentrl.distributed.broadcast import BroadcastGroup, Bucket, Rendezvous, in_buckets
from agentrl.errors import ServerRefused
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import MIXED_VERSION, PauseMode

BUCKET_BYTES = 100_000
"""The checkpoint is sent in several parts."""


@dataclass
class Sender:
    """The trainer's side of a group with one server."""

    client: SGLangClient
    group: BroadcastGroup
    name: str

    async def send(self, served: Served, *, version: str, flush: bool = True) -> None:
        """Send the second checkpoint."""
        tensors = load_file(served.second / "model.safetensors")
        buckets = list(in_buckets(([item] for item in tensors.items()), BUCKET_BYTES))
        assert len(buckets) > 3
        for bucket in buckets:
            await asyncio.gather(
                self.client.update_weights_from_distributed(
                    bucket,
                    group=self.name,
                    weight_version=version if bucket.is_last else None,
                    flush_cache=flush and bucket.is_last,
                ),
                self.group.broadcast(bucket.tensors, 20),
            )


@asynccontextmanager
async def joined(client: SGLangClient) -> AsyncIterator[Sender]:
    rendezvous = Rendezvous("127.0.0.1", 2, 20)
    name = uuid.uuid4().hex
    joining = client.init_weights_update_group(
        host="127.0.0.1",
        port=rendezvous.port,
        rank_offset=1,
        world_size=2,
        name=name,
        backend="gloo",
    )
    group, _ = await asyncio.gather(rendezvous.form_group(name, "gloo"), joining)
    try:
        yield Sender(client, group, name)
    finally:
        group.leave()
        await client.destroy_weights_update_group(name)


@pytest.fixture
async def sender(client: SGLangClient) -> AsyncIterator[Sender]:
    async with joined(client) as sender:
        yield sender


async def test_broadcast_weights_are_those_of_the_checkpoint(
    client: SGLangClient, sender: Sender, served: Served, oracle: Oracle
) -> None:
    await client.generate(request(60, 100))
    await client.begin_weight_update()
    await sender.send(served, version=SECOND)
    await client.end_weight_update()
    assert (await client.model_info()).weight_version == 2
    got = await client.generate(request(60, 100))
    assert [span.version for span in got.version_spans] == [2]
    assert got.cached_tokens == 0
    expected = oracle.logprobs(served.second, prompt(60, 100), got.output_ids)
    np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)


async def test_a_group_serves_many_updates(
    client: SGLangClient, sender: Sender, served: Served
) -> None:
    for version in ("2", "3"):
        await client.begin_weight_update()
        await sender.send(served, version=version)
        await client.end_weight_update()
        assert (await client.model_info()).weight_version == int(version)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_generations_in_flight_go_on_with_broadcast_weights(
    client: SGLangClient,
    http: httpx.AsyncClient,
    sender: Sender,
    served: Served,
    oracle: Oracle,
    mode: PauseMode,
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause(mode)
        await client.begin_weight_update()
        await sender.send(served, version=SECOND, flush=mode == "retract")
        await client.end_weight_update()
        await client.continue_()
        for seed, task in enumerate(tasks):
            got = await task
            switch = split_at_update(got)
            old = oracle.logprobs(served.first, prompt(seed), got.output_ids)
            np.testing.assert_allclose(got.output_logprobs[:switch], old[:switch], atol=1e-4)
            if mode == "retract":
                new = oracle.logprobs(served.second, prompt(seed), got.output_ids)
                np.testing.assert_allclose(got.output_logprobs[switch:], new[switch:], atol=1e-4)


async def test_abort_then_broadcast_holds_new_requests_until_it_is_over(
    client: SGLangClient, http: httpx.AsyncClient, sender: Sender, served: Served
) -> None:
    async with in_flight(client, http) as tasks:
        await client.pause("abort")
        assert {(await task).finish_reason for task in tasks} == {"abort"}
        held = asyncio.create_task(client.generate(request(61)))
        await client.begin_weight_update()
        await sender.send(served, version=SECOND)
        await client.end_weight_update()
        await client.continue_()
        assert [span.version for span in (await held).version_spans] == [2]


async def test_weights_come_within_a_session_only(client: SGLangClient, sender: Sender) -> None:
    bucket = Bucket((("model.norm.weight", torch.ones(64)),))
    with pytest.raises(ServerRefused, match="begin_weight_update") as refused:
        await client.update_weights_from_distributed(bucket, group=sender.name)
    assert refused.value.status == 400


async def test_a_group_that_is_not_known_is_refused(client: SGLangClient) -> None:
    with pytest.raises(ServerRefused) as refused:
        await client.destroy_weights_update_group("nobody")
    assert refused.value.status == 400
    bucket = Bucket((("model.norm.weight", torch.ones(64)),))
    await client.begin_weight_update()
    try:
        with pytest.raises(ServerRefused, match="Failed to receive weights"):
            await client.update_weights_from_distributed(bucket, group="nobody")
    finally:
        await client.end_weight_update()


async def test_a_sender_that_goes_away_is_noticed(client: SGLangClient, served: Served) -> None:
    bucket = Bucket((("model.norm.weight", torch.ones(64)),))
    async with joined(client) as sender:
        await client.begin_weight_update()
        receiving = asyncio.create_task(
            client.update_weights_from_distributed(bucket, group=sender.name)
        )
        await asyncio.sleep(0)
        sender.group.leave()
        with pytest.raises(ServerRefused, match="Failed to receive weights"):
            await receiving
        await client.end_weight_update()
    # The embedded engine receives in place, and cannot tell that nothing had come.
    left = MIXED_VERSION if served.kind == "embedded" else int(FIRST)
    assert (await client.model_info()).weight_version == left

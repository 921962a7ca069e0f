#!/usr/bin/env python
"""Time for new weights from the trainer to all servers, relative to the link's own time.

    python benchmarks/weight_sync.py --out benchmarks/results/weight_sync.json

A model with random weights (0.7 GB in float32, where bytes dominate calls) is published a few times
to embedded engines that sample continuously. It is a mixture of experts, because a step of a dense
model of this size takes a CPU a quarter of the time that its bytes take over the link; a GPU
computes a step in a few hundredths of it. The clock starts when a step's weights are in the
trainer's memory and stops when every server has sampled a token with them: export, fsync, the
store, pauses, loading and the first token are all included. `ratio` is the median over the rounds
of publication time over link time; right before and right after every publication, with the engines
idle, the same bytes go over the link without any further work, and the mean of the two counts:

disk         written, made durable, and read once by as many readers as there are servers
distributed  broadcast by gloo over loopback, tensor by tensor, into the memory of as many processes
             as there are servers; `tcp_seconds` is the same over plain TCP connections, from one
             block in the cache to another

`floor_ratio` is the publication time over the least that this machine needs while servers sample: the
link (for the disk, measured beside sampling engines, as in a publication; broadcasts find them
paused) and a token of every server at once (`token_seconds`).

`distributed` reports the duration of each phase of a publication. `adapter` is the same model's
LoRA adapter, by disk; `demo` a model of the demo's size, where calls dominate bytes; `dense` a
dense model, `dense_ratio` the worse of its two ratios.

`delta` compares `--weight_sync delta` with `disk`, in alternation, for a dense model and one of
experts in bfloat16. Before every publication each value of float32 master weights moves by up to
the learning rate, as in a step of AdamW, and is rounded; `sent_share` is the share of the values
that were sent. `--only PART` measures one part (experts, dense, demo, delta_dense, delta_experts)
and adds it to the file.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from harness.machine import machine
from harness.processes import engine_process
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.broadcast import Bucket, RankAssignment, Rendezvous, in_buckets, join_group
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import AdapterNames, PolicyPublisher, PublishReport
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery, SendWeights
from agentrl.inference.weight_sync.delta_delivery import DeltaDelivery
from agentrl.inference.wire import GenerateRequest
from agentrl.models.checkpoint_export import save_hf
from agentrl.models.checkpoints.adapter_files import AdapterShape
from agentrl.models.lora import (
    adapter_tensors,
    add_adapter,
    has_adapter,
    save_adapter,
    start_adapter,
)
from agentrl.models.policy import PolicyModel
from agentrl.schema import InferenceService, Run, SamplingParams
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

TOKENIZER = Path(__file__).resolve().parents[1] / "assets/demo/model"
_CHUNK = 1 << 22
_LINK_SECONDS = 120.0
# Short: on a CPU, recomputing a long generation would take longer than sending the bytes.
_PROMPT_TOKENS = 2
_NEW_TOKENS = 12
BOUND = 1.2
LEARNING_RATES = (1e-7, 1e-6, 1e-5)


def make_policy(num_layers: int) -> PolicyModel:
    """Return a mixture of 32 experts, with 54 million parameters per layer and 17 million more."""
    return _policy(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            vocab_size=32768,
            hidden_size=512,
            intermediate_size=1024,
            moe_intermediate_size=1024,
            num_experts=32,
            num_experts_per_tok=2,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            head_dim=128,  # type: ignore[call-arg]  # not among its declared fields
        ),
    )


def make_dense_policy() -> PolicyModel:
    """Return a dense model of 170 million parameters."""
    return _policy(
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=32768,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=9,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
    )


def make_demo_policy() -> PolicyModel:
    """Return a dense model of 0.8 million parameters, about what the demo has."""
    return _policy(
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
    )


def _policy(kind: Callable[[Any], PreTrainedModel], config: PretrainedConfig) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(kind(config))


def disk_seconds(folder: Path, num_bytes: int, num_readers: int) -> float:
    """Return how long the same bytes take from memory over the disk to the readers."""
    block = os.urandom(_CHUNK)
    path = folder / "link"
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // _CHUNK):
            file.write(block)
        os.fsync(file.fileno())

    def read(_: int) -> None:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_CHUNK)
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(num_readers) as readers:
        list(readers.map(read, range(num_readers)))
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def tcp_seconds(num_bytes: int, num_readers: int) -> float:
    """Return how long the same bytes take over TCP on loopback to each of the readers."""
    block = os.urandom(_CHUNK)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        ends = []
        for _number in range(num_readers):
            reader = stack.enter_context(socket.create_connection(listener.getsockname()))
            ends.append((stack.enter_context(listener.accept()[0]), reader))

        def send(writer: socket.socket) -> None:
            for _number in range(num_bytes // _CHUNK):
                writer.sendall(block)

        def read(reader: socket.socket) -> None:
            buffer = bytearray(_CHUNK)
            left = num_bytes // _CHUNK * _CHUNK
            while left:
                left -= reader.recv_into(buffer)

        started = time.perf_counter()
        with ThreadPoolExecutor(2 * num_readers) as pool:
            moving = [pool.submit(send, writer) for writer, _reader in ends]
            moving += [pool.submit(read, reader) for _writer, reader in ends]
            for future in moving:
                future.result()
        return time.perf_counter() - started


class GlooLink:
    """Repeatedly sends the same tensors from this process's memory to other processes."""

    def __init__(self, policy: PolicyModel, num_readers: int) -> None:
        self._tensors = [tensor.detach() for tensor in policy.parameters()]
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        context = multiprocessing.get_context("spawn")
        self._got = context.SimpleQueue()
        self._rendezvous = Rendezvous("127.0.0.1", num_readers + 1, _LINK_SECONDS)
        self._readers = [
            context.Process(
                target=read_broadcasts,
                args=(
                    self._rendezvous.port,
                    number + 1,
                    num_readers + 1,
                    shapes,
                    self._got,
                ),
            )
            for number in range(num_readers)
        ]
        for reader in self._readers:
            reader.start()

    async def __aenter__(self) -> Self:
        self._group = await self._rendezvous.form_group("link", "gloo")
        for _ in self._readers:
            self._got.get()
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.terminate()
            reader.join()
        self._group.leave()

    async def seconds(self) -> float:
        """Return the seconds until all have received everything."""
        started = time.perf_counter()
        await self._group.broadcast(self._tensors, _LINK_SECONDS)
        for _ in self._readers:
            self._got.get()
        return time.perf_counter() - started


def read_broadcasts(
    port: int, rank: int, world_size: int, shapes: list[tuple[int, ...]], got: Any
) -> None:
    """Run as one of the readers, in a separate process that is ended from outside."""

    async def read() -> None:
        torch.set_num_threads(1)
        memory = [torch.zeros(shape) for shape in shapes]
        seat = RankAssignment("127.0.0.1", port, rank, world_size)
        group = await join_group(seat, "link", "gloo", _LINK_SECONDS)
        got.put(rank)
        while True:
            await group.broadcast(memory, _LINK_SECONDS)
            got.put(rank)

    asyncio.run(read())


def sender_of(policy: PolicyModel) -> SendWeights:
    """Return the function that sends the policy's weights in buckets."""

    async def send(max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            state = policy.model.state_dict()
            state.pop("lm_head.weight")  # tied
            for bucket in in_buckets(([entry] for entry in state.items()), max_bytes):
                sink(bucket)

        await asyncio.to_thread(work)

    return send


class Servers:
    """Engines that sample continuously, each with the newest version."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.adapter: str | None = None
        self._turns = {url: asyncio.Lock() for url in urls}

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Keep a generation going on every server."""
        tasks = [asyncio.create_task(self._keep_sampling(url)) for url in self.urls]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Keep the servers idle."""
        async with AsyncExitStack() as stack:
            for turn in self._turns.values():
                await stack.enter_async_context(turn)
            yield

    async def token_seconds(self) -> float:
        """Return how long one token of every idle server takes."""
        started = time.perf_counter()
        await asyncio.gather(*(self._token(url) for url in self.urls))
        return time.perf_counter() - started

    async def until_sampling(self, version: int) -> None:
        """Return once every server has sampled a token with this version."""
        await asyncio.gather(*(self._until_sampling(url, version) for url in self.urls))

    async def _keep_sampling(self, url: str) -> None:
        async with SGLangClient(url) as client:
            seed = 0
            while True:
                async with self._turns[url]:
                    await client.generate(self._request(seed, _NEW_TOKENS))
                seed += 1

    async def _token(self, url: str) -> None:
        async with SGLangClient(url) as client:
            await client.generate(self._request(7, 1))

    async def _until_sampling(self, url: str, version: int) -> None:
        async with SGLangClient(url) as client:
            while (await client.generate(self._request(7, 1))).version_spans[-1].version != version:
                pass

    def _request(self, seed: int, num_tokens: int) -> GenerateRequest:
        prompt = np.random.default_rng(seed).integers(0, 250, _PROMPT_TOKENS).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=num_tokens)
        return GenerateRequest(input_ids=prompt, sampling=sampling, adapter=self.adapter)


@dataclass(frozen=True)
class Bench:
    """A model that is published to servers."""

    folder: Path
    policy: PolicyModel
    urls: Sequence[str]
    rounds: int

    async def measure(self, way: str) -> dict[str, Any]:
        """Publish a few versions over `disk` or `distributed`, or as an `adapter`."""
        folder = self.folder / way
        folder.mkdir()
        policy = (
            with_adapter(self.policy, self.folder / "first") if way == "adapter" else self.policy
        )
        section = PublishSection(weight_sync="distributed" if way == "distributed" else "disk")
        delivery = None
        async with AsyncExitStack() as stack:
            mongo = stack.enter_context(EmbeddedMongo(folder / "mongo"))
            store = await stack.enter_async_context(TrajectoryStore.connect(mongo.uri("bench")))
            link = None
            if way == "distributed":
                delivery = BroadcastDelivery(section, sender_of(policy), "gloo")
                link = await stack.enter_async_context(GlooLink(policy, len(self.urls)))
            await register(store, self.urls)
            publisher = PolicyPublisher(
                store,
                folder / "policy",
                publish=section,
                inference=InferenceSection(),
                delivery=delivery,
                adapters=AdapterNames("bench") if way == "adapter" else None,
            )
            servers = Servers(self.urls)
            sent = adapter_tensors(policy).values() if way == "adapter" else policy.parameters()
            num_bytes = sum(tensor.nbytes for tensor in sent)
            results = []

            async def link_seconds() -> float:
                if link is not None:
                    return await link.seconds()
                return await asyncio.to_thread(disk_seconds, folder, num_bytes, len(self.urls))

            async with servers.sampling():
                async with servers.idle():
                    before = await link_seconds()
                for version in range(1, self.rounds + 1):
                    results.append(await publish(publisher, policy, store, servers, version))
                    await publisher.settle()
                    result = results[-1]
                    if delivery is not None:
                        result["phases"] = dict(delivery.phases)
                    beside = None if link is not None else await link_seconds()
                    async with servers.idle():
                        after = await link_seconds()
                        if link is not None:
                            result["tcp_seconds"] = await asyncio.to_thread(
                                tcp_seconds, num_bytes, len(self.urls)
                            )
                        result["token_seconds"] = await servers.token_seconds()
                    result["link_seconds"], before = (before + after) / 2, after
                    if beside is not None:
                        result["link_beside_sampling_seconds"] = beside
                    floor = (beside or result["link_seconds"]) + result["token_seconds"]
                    result["ratio"] = result["seconds"] / result["link_seconds"]
                    result["floor_ratio"] = result["seconds"] / floor
                    print(way, json.dumps(result))
        return figures(results)


async def register(store: TrajectoryStore, urls: Sequence[str]) -> None:
    """Create a run with these servers."""
    await store.ensure_schema()
    await store.runs.create(Run(name="bench"))
    for number, url in enumerate(urls):
        await store.services.register(
            InferenceService(id=str(number), base_url=url, backend="embedded", model_path="m")
        )


def with_adapter(policy: PolicyModel, base: Path) -> PolicyModel:
    """Give a policy an adapter of rank 16 on its attention, as `--lora_rank 16` does."""
    shape = AdapterShape(16, 32, ("q_proj", "k_proj", "v_proj", "o_proj"), str(base))
    add_adapter(policy.model, shape, dtype=torch.float32)
    start_adapter(policy, seed=0)
    return policy


async def publish(
    publisher: PolicyPublisher,
    policy: PolicyModel,
    store: TrajectoryStore,
    servers: Servers,
    version: int,
) -> dict[str, Any]:
    """Publish the policy as one version; return the figures."""
    directory = publisher.directory(version)
    directory.parent.mkdir(exist_ok=True)
    sent: list[torch.Tensor] = list(policy.parameters())
    started = time.perf_counter()
    if has_adapter(policy):
        tensors = adapter_tensors(policy)
        sent = list(tensors.values())
        await asyncio.to_thread(save_adapter, policy, directory, tensors, dtype=torch.float32)
    elif publisher.needs_files:
        await asyncio.to_thread(save_hf, policy, directory)
    exported = time.perf_counter()

    async def announce() -> tuple[PublishReport, float]:
        report = await publisher.announce(version)
        if report.failed:
            raise SystemExit(f"a server failed: {report.failed}")
        return report, time.perf_counter()

    if has_adapter(policy):
        report, announced = await announce()
        servers.adapter = (await store.services.all())[0].adapter
        await servers.until_sampling(version)
    else:
        # Started before the announcement; a later start could miss the first token by a step.
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(announce())
            tasks.create_task(servers.until_sampling(version))
        report, announced = announcing.result()
    ended = time.perf_counter()
    return {
        "bytes": sum(tensor.nbytes for tensor in sent),
        "seconds": ended - started,
        "export_seconds": exported - started,
        "announce_seconds": announced - exported,
        "paused_seconds": report.paused_seconds,
    }


class MasterWeights:
    """Float32 weights behind a policy in bfloat16."""

    def __init__(self, policy: PolicyModel) -> None:
        self._masters = [parameter.detach().float() for parameter in policy.parameters()]
        self._parameters = list(policy.parameters())
        for parameter in self._parameters:
            parameter.data = parameter.data.to(torch.bfloat16)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every value by up to the learning rate, and round."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.add_(torch.rand_like(master).mul_(2).sub_(1), alpha=learning_rate)
            parameter.copy_(master)


async def measure_delta(bench: Bench, masters: MasterWeights) -> dict[str, Any]:
    """Publish the changes of a few steps at each learning rate, and everything, in alternation."""
    section = PublishSection(weight_sync="delta")
    delivery = DeltaDelivery(section, sender_of(bench.policy))
    with EmbeddedMongo(bench.folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("bench")) as store:
            await register(store, bench.urls)
            root = bench.folder / "policy"
            publishers = {
                way: PolicyPublisher(
                    store,
                    root,
                    publish=section,
                    inference=InferenceSection(),
                    delivery=way_delivery,
                )
                for way, way_delivery in (("delta", delivery), ("disk", None))
            }
            servers = Servers(bench.urls)
            version = 1
            rows: list[dict[str, Any]] = []
            disk: list[dict[str, Any]] = []
            async with servers.sampling():
                await publish(publishers["delta"], bench.policy, store, servers, version)
                for learning_rate in LEARNING_RATES:
                    found: list[dict[str, Any]] = []
                    for _ in range(bench.rounds):
                        for way, publisher in publishers.items():
                            if way == "delta":
                                masters.step(learning_rate)
                            version += way == "delta"
                            figures_of_version = await publish(
                                publisher, bench.policy, store, servers, version
                            )
                            await publisher.settle()
                            (found if way == "delta" else disk).append(figures_of_version)
                    assert delivery.size is not None
                    rows.append({"learning_rate": learning_rate, **asdict(delivery.size)})
                    rows[-1]["seconds"] = statistics.median(one["seconds"] for one in found)
                    rows[-1]["paused_seconds_max"] = max(
                        max(one["paused_seconds"].values()) for one in found
                    )
    seconds = statistics.median(one["seconds"] for one in disk)
    for row in rows:
        row["bytes_ratio"] = row["num_bytes"] / row["full_bytes"]
        row["seconds_ratio"] = row["seconds"] / seconds
        print("delta", json.dumps(row))
    return {"disk_seconds": seconds, "rates": rows}


def delta_of(policy: PolicyModel, num_servers: int, rounds: int) -> dict[str, Any]:
    """Return the costs of a model's deltas."""
    masters = MasterWeights(policy)
    with serving(policy, num_servers, rounds) as bench:
        return asyncio.run(measure_delta(bench, masters))


def figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined figures of one way's rounds."""
    found = {
        "ratio": statistics.median(item["ratio"] for item in rounds),
        "floor_ratio": statistics.median(item["floor_ratio"] for item in rounds),
        "bytes": rounds[0]["bytes"],
        "seconds": statistics.median(item["seconds"] for item in rounds),
        "paused_seconds_max": max(max(item["paused_seconds"].values()) for item in rounds),
    }
    if "phases" in rounds[0]:
        found["phases"] = {
            phase: statistics.median(item["phases"][phase] for item in rounds)
            for phase in rounds[0]["phases"]
        }
    return found | {"rounds": list(rounds)}


@contextmanager
def serving(policy: PolicyModel, num_servers: int, rounds: int) -> Iterator[Bench]:
    """Start engines with a policy's weights."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, ExitStack() as stack:
        first = Path(name) / "first"
        shutil.copytree(
            TOKENIZER, first, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        policy.model.save_pretrained(first)
        urls = [stack.enter_context(engine_process(first)) for _ in range(num_servers)]
        yield Bench(Path(name), policy, urls, rounds)


def measure_ways(
    policy: PolicyModel, ways: Sequence[str], num_servers: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return the figures of a model by each way of publishing."""
    with serving(policy, num_servers, rounds) as bench:
        found = {way: asyncio.run(bench.measure(way)) for way in ways}
    for way, row in found.items():
        print(way, json.dumps({name: value for name, value in row.items() if name != "rounds"}))
    return found


def without_link(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of payloads too small to compare with the link."""
    return {name: value for name, value in row.items() if not name.endswith(("ratio", "rounds"))}


def experts(num_layers: int, num_servers: int, rounds: int) -> dict[str, Any]:
    """Measure the expert model with every way of publishing."""
    # The adapter comes last: it changes the model.
    ways = ("disk", "distributed", "adapter")
    found = measure_ways(make_policy(num_layers), ways, num_servers, rounds)
    return {
        **found["disk"],
        "broadcast_ratio": found["distributed"]["ratio"],
        "distributed": found["distributed"],
        "adapter": without_link(found["adapter"]),
    }


def dense(_: int, num_servers: int, rounds: int) -> dict[str, Any]:
    """Measure the dense model; its ratio is the worse of the two."""
    found = measure_ways(make_dense_policy(), ("disk", "distributed"), num_servers, rounds)
    return {"dense_ratio": max(row["ratio"] for row in found.values()), "dense": found}


def demo(_: int, num_servers: int, rounds: int) -> dict[str, Any]:
    """Measure a model of the demo's size."""
    found = measure_ways(make_demo_policy(), ("disk", "distributed"), num_servers, rounds)
    return {"demo": {way: without_link(row) for way, row in found.items()}}


PARTS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "experts": experts,
    "dense": dense,
    "demo": demo,
    "delta_dense": lambda _, *sizes: {"delta": {"dense": delta_of(make_dense_policy(), *sizes)}},
    "delta_experts": lambda layers, *sizes: {
        "delta": {"experts": delta_of(make_policy(layers), *sizes)}
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result; 1 if a ratio exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {}
    if args.out and args.out.exists():
        result = json.loads(args.out.read_text())
    for part in args.only or PARTS:
        about = {part: machine()}
        found = PARTS[part](args.layers, args.servers, args.rounds)
        if "delta" in found:
            found = {"delta": result.get("delta", {}) | found["delta"]}
        result |= found
        result |= {
            "bound": BOUND,
            "servers": args.servers,
            "machine": result.get("machine", {}) | about,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    ratios = [result[key] for key in ("ratio", "broadcast_ratio", "dense_ratio") if key in result]
    return int(max(ratios, default=0) > BOUND)


if __name__ == "__main__":
    sys.exit(main())

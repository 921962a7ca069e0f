"""Time for new weights from the trainer to all servers, relative to the link's own time.

    python benchmarks/weight_sync.py

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
             as there are servers

`distributed` reports the duration of each phase of a publication; `dense` is a dense model,
`dense_ratio` the worse of its two ratios.

`--only PART` measures one part and adds it to the file.
"""

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from harness.processes import engine_process
from harness.results import keep, machine, parser, stored
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.broadcast import Bucket, RankAssignment, Rendezvous, in_buckets, join_group
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher, PublishReport
from agentrl.inference.weight_sync.broadcast_delivery import BroadcastDelivery
from agentrl.inference.weight_sync.memory_delivery import SendWeights
from agentrl.inference.wire import GenerateRequest
from agentrl.models.checkpoint_export import save_hf
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


_COMMON = {
    "vocab_size": 32768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}


def expert_policy(num_layers: int) -> PolicyModel:
    """Return a mixture of 32 experts, with 54 million parameters per layer and 17 million more."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": num_layers}
    torch.manual_seed(0)
    return PolicyModel(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_EXPERTS, **sizes)))  # type: ignore[arg-type]


def dense_policy(_: int) -> PolicyModel:
    """Return a dense model of 170 million parameters."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 9}
    torch.manual_seed(0)
    return PolicyModel(Qwen3ForCausalLM(Qwen3Config(**_COMMON, **sizes)))  # type: ignore[arg-type]


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
                args=(self._rendezvous.port, number + 1, num_readers + 1, shapes, self._got),
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

    async def _until_sampling(self, url: str, version: int) -> None:
        async with SGLangClient(url) as client:
            while (await client.generate(self._request(7, 1))).version_spans[-1].version != version:
                pass

    def _request(self, seed: int, num_tokens: int) -> GenerateRequest:
        prompt = np.random.default_rng(seed).integers(0, 250, _PROMPT_TOKENS).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=num_tokens)
        return GenerateRequest(input_ids=prompt, sampling=sampling)


@dataclass(frozen=True)
class Bench:
    """A model that is published to servers."""

    folder: Path
    policy: PolicyModel
    urls: Sequence[str]
    rounds: int

    async def measure(self, way: str) -> dict[str, Any]:
        """Publish a few versions over `disk` or `distributed`."""
        folder = self.folder / way
        folder.mkdir()
        section = PublishSection.model_validate({"weight_sync": way})
        num_bytes = sum(tensor.nbytes for tensor in self.policy.parameters())
        delivery = link = None
        async with AsyncExitStack() as stack:
            mongo = stack.enter_context(EmbeddedMongo(folder / "mongo"))
            store = await stack.enter_async_context(TrajectoryStore.connect(mongo.uri("bench")))
            if way == "distributed":
                delivery = BroadcastDelivery(section, sender_of(self.policy), "gloo")
                link = await stack.enter_async_context(GlooLink(self.policy, len(self.urls)))
            await register(store, self.urls)
            publisher = PolicyPublisher(
                store,
                folder / "policy",
                publish=section,
                inference=InferenceSection(),
                delivery=delivery,
            )
            servers = Servers(self.urls)
            results: list[dict[str, Any]] = []

            async def link_seconds() -> float:
                async with servers.idle():
                    if link is not None:
                        return await link.seconds()
                    return await asyncio.to_thread(disk_seconds, folder, num_bytes, len(self.urls))

            async with servers.sampling():
                before = await link_seconds()
                for version in range(1, self.rounds + 1):
                    result = await publish(publisher, self.policy, servers, version)
                    await publisher.settle()
                    if delivery is not None:
                        result["phases"] = dict(delivery.phases)
                    after = await link_seconds()
                    result["link_seconds"], before = (before + after) / 2, after
                    result["ratio"] = result["seconds"] / result["link_seconds"]
                    results.append(result)
        return figures(results) | {"bytes": num_bytes}


async def register(store: TrajectoryStore, urls: Sequence[str]) -> None:
    """Create a run with these servers."""
    await store.ensure_schema()
    await store.runs.create(Run(name="bench"))
    for number, url in enumerate(urls):
        await store.services.register(
            InferenceService(id=str(number), base_url=url, backend="embedded", model_path="m")
        )


async def publish(
    publisher: PolicyPublisher, policy: PolicyModel, servers: Servers, version: int
) -> dict[str, Any]:
    """Publish the policy as one version; return the figures."""
    directory = publisher.directory(version)
    directory.parent.mkdir(exist_ok=True)
    started = time.perf_counter()
    if publisher.needs_files:
        await asyncio.to_thread(save_hf, policy, directory)
    exported = time.perf_counter()

    async def announce() -> PublishReport:
        report = await publisher.announce(version)
        if report.failed:
            raise SystemExit(f"a server failed: {report.failed}")
        return report

    # Started before the announcement; a later start could miss the first token by a step.
    async with asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(announce())
        tasks.create_task(servers.until_sampling(version))
    return {
        "seconds": time.perf_counter() - started,
        "export_seconds": exported - started,
        "paused_seconds": max(announcing.result().paused_seconds.values()),
    }


def figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined figures of one way's rounds."""
    found = {
        "ratio": median(item["ratio"] for item in rounds),
        "seconds": median(item["seconds"] for item in rounds),
        "paused_seconds_max": max(item["paused_seconds"] for item in rounds),
    }
    if "phases" in rounds[0]:
        found["phases"] = {
            phase: median(item["phases"][phase] for item in rounds) for phase in rounds[0]["phases"]
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


def ways(policy: PolicyModel, num_servers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of a model by each way of publishing."""
    with serving(policy, num_servers, rounds) as bench:
        return {way: asyncio.run(bench.measure(way)) for way in ("disk", "distributed")}


MODELS = {"experts": expert_policy, "dense": dense_policy}


def main() -> None:
    """Measure the parts; the file keeps what is not measured again."""
    flags = parser(__doc__, "weight_sync")
    flags.add_argument("--layers", type=int, default=3)
    flags.add_argument("--servers", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument(
        "--only", choices=MODELS, nargs="+", default=list(MODELS), help="these parts"
    )
    given = flags.parse_args()
    for part in given.only:
        about = machine()
        found = ways(MODELS[part](given.layers), given.servers, given.rounds)
        if part == "experts":
            found = {**found["disk"], **found, "broadcast_ratio": found["distributed"]["ratio"]}
            del found["disk"]
        else:
            found = {"dense_ratio": max(row["ratio"] for row in found.values()), "dense": found}
        machines = stored(given.out).get("machine", {}) | {part: about}
        keep(given.out, {**found, "servers": given.servers, "machine": machines})


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""How long new weights take from the trainer to all servers, against the disk they go over.

    python benchmarks/weight_sync.py --out benchmarks/results/weight_sync.json

A model with random weights (0.6 GB in float32, so that bytes and not calls decide) is published a few
times to embedded engines that sample all the while. The clock starts when a step's weights stand
in the trainer's memory and stops when every server has sampled a token with them: export, fsync,
the store, pauses, loading and the first token are all in it.

The link between trainer and servers is the disk. Its bandwidth is measured beside every
publication: the same bytes, written, made durable, and read once by as many readers as there are
servers, with nothing else done to them. `ratio` is the median over the rounds of publication time
over link time.

`distributed` has the same for weights that are broadcast (`--weight_sync distributed`): there the
link is the loopback interface, and the bytes go once from memory to every reader over a TCP
connection of its own.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.engines import engine_process, request
from support.tiny_tokenizer import write_tokenizer

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.distributed.buckets import Bucket, in_buckets
from agentrl.inference.client import SGLangClient
from agentrl.models.export import checkpoint_tensors, save_hf
from agentrl.models.policy import PolicyModel
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.weight_sync import PolicyPublisher
from agentrl.weight_sync.broadcast import BroadcastDelivery, SendWeights

_CHUNK = 1 << 22
# Short: on a CPU, computing a long generation again would take longer than the bytes do.
_PROMPT_TOKENS = 8
_NEW_TOKENS = 12


def make_policy(num_layers: int) -> PolicyModel:
    """Return a model of 6 to 13 million parameters a layer and 34 million beside them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return PolicyModel(Qwen3ForCausalLM(config))


def link_seconds(folder: Path, num_bytes: int, num_readers: int) -> float:
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


def loopback_seconds(_: Path, num_bytes: int, num_readers: int) -> float:
    """Return how long the same bytes take from memory over loopback to each of the readers."""
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


def sender_of(policy: PolicyModel) -> SendWeights:
    """Return what hands out the policy's weights in buckets."""

    async def send(max_bytes: int, sink: Callable[[Bucket], None]) -> None:
        def work() -> None:
            state = policy.model.state_dict()
            state.pop("lm_head.weight")  # tied
            groups = (checkpoint_tensors(policy, name, value) for name, value in state.items())
            for bucket in in_buckets(groups, max_bytes):
                sink(bucket)

        await asyncio.to_thread(work)

    return send


async def keep_sampling(url: str) -> None:
    """Keep a generation going on a server."""
    async with SGLangClient(url) as client:
        seed = 0
        while True:
            await client.generate(request(seed, _PROMPT_TOKENS, max_new_tokens=_NEW_TOKENS))
            seed += 1


async def until_sampling(url: str, version: int) -> None:
    """Return once a server has sampled a token with this version."""
    async with SGLangClient(url) as client:
        while True:
            got = await client.generate(request(7, _PROMPT_TOKENS, max_new_tokens=1))
            if got.version_spans[-1].version == version:
                return


async def measure(
    folder: Path, policy: PolicyModel, urls: Sequence[str], rounds: int, way: str
) -> Any:
    """Publish `rounds` versions; return the figures of each."""
    results = []
    section = PublishSection(weight_sync=way)
    is_broadcast = way == "distributed"
    delivery = BroadcastDelivery(section, sender_of(policy), "gloo") if is_broadcast else None
    link = loopback_seconds if is_broadcast else link_seconds
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("bench")) as store:
            await store.ensure_schema()
            await store.create_run(Run(name="bench"))
            for number, url in enumerate(urls):
                await store.register_service(
                    InferenceService(
                        id=str(number), base_url=url, backend="embedded", model_path="m"
                    )
                )
            publisher = PolicyPublisher(
                store,
                folder / "policy",
                publish=section,
                inference=InferenceSection(),
                delivery=delivery,
            )
            sampling = [asyncio.create_task(keep_sampling(url)) for url in urls]
            for version in range(1, rounds + 1):
                await publisher.settle()
                results.append(await publish(publisher, policy, urls, version))
                num_bytes = int(results[-1]["bytes"])
                spent = await asyncio.to_thread(link, folder, num_bytes, len(urls))
                results[-1] |= {"link_seconds": spent, "ratio": results[-1]["seconds"] / spent}
                print(json.dumps(results[-1]))
            await publisher.settle()
            for task in sampling:
                task.cancel()
            await asyncio.gather(*sampling, return_exceptions=True)
    return results


async def publish(
    publisher: PolicyPublisher, policy: PolicyModel, urls: Sequence[str], version: int
) -> dict[str, Any]:
    """Publish the policy as one version; return the figures."""
    directory = publisher.directory(version)
    directory.parent.mkdir(exist_ok=True)
    started = time.perf_counter()
    if publisher.needs_files:
        await asyncio.to_thread(save_hf, policy, directory)
    exported = time.perf_counter()
    report = await publisher.announce(version)
    announced = time.perf_counter()
    await asyncio.gather(*(until_sampling(url, version) for url in urls))
    ended = time.perf_counter()
    if report.failed:
        raise SystemExit(f"a server failed: {report.failed}")
    return {
        "bytes": sum(parameter.nbytes for parameter in policy.parameters()),
        "seconds": ended - started,
        "export_seconds": exported - started,
        "announce_seconds": announced - exported,
        "paused_seconds": report.paused_seconds,
    }


def figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rounds of one way show together."""
    return {
        "ratio": statistics.median(item["ratio"] for item in rounds),
        "bytes": rounds[0]["bytes"],
        "seconds": statistics.median(item["seconds"] for item in rounds),
        "paused_seconds_max": max(max(item["paused_seconds"].values()) for item in rounds),
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result; 1 when the ratio is past its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    policy = make_policy(args.layers)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, ExitStack() as stack:
        folder = Path(name)
        write_tokenizer(folder / "first")
        policy.model.save_pretrained(folder / "first")
        urls = [
            stack.enter_context(engine_process(folder / "first", "--kv-cache-bytes", str(1 << 28)))
            for _ in range(args.servers)
        ]
        for way in ("disk", "distributed"):
            (folder / way).mkdir()
        ways = {
            way: asyncio.run(measure(folder / way, policy, urls, args.rounds, way))
            for way in ("disk", "distributed")
        }
    result = {
        **figures(ways["disk"]),
        "bound": 1.5,
        "servers": args.servers,
        "distributed": figures(ways["distributed"]),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    for way in (result, result["distributed"]):
        print(json.dumps({name: way[name] for name in ("ratio", "seconds", "paused_seconds_max")}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    ratios = (result["ratio"], result["distributed"]["ratio"])
    return int(max(ratios) > result["bound"])


if __name__ == "__main__":
    sys.exit(main())

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
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
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
from agentrl.inference.client import SGLangClient
from agentrl.models.export import save_hf
from agentrl.models.policy import PolicyModel
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.weight_sync import PolicyPublisher

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


async def measure(folder: Path, policy: PolicyModel, urls: Sequence[str], rounds: int) -> Any:
    """Publish `rounds` versions; return the figures of each."""
    results = []
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
                store, folder / "policy", publish=PublishSection(), inference=InferenceSection()
            )
            sampling = [asyncio.create_task(keep_sampling(url)) for url in urls]
            for version in range(1, rounds + 1):
                await publisher.settle()
                results.append(await publish(publisher, policy, urls, version))
                num_bytes = int(results[-1]["bytes"])
                link = await asyncio.to_thread(link_seconds, folder, num_bytes, len(urls))
                results[-1] |= {"link_seconds": link, "ratio": results[-1]["seconds"] / link}
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
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    await asyncio.to_thread(save_hf, policy, directory)
    exported = time.perf_counter()
    report = await publisher.announce(version)
    announced = time.perf_counter()
    await asyncio.gather(*(until_sampling(url, version) for url in urls))
    ended = time.perf_counter()
    if report.failed:
        raise SystemExit(f"a server failed: {report.failed}")
    return {
        "bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        "seconds": ended - started,
        "export_seconds": exported - started,
        "announce_seconds": announced - exported,
        "paused_seconds": report.paused_seconds,
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
        rounds = asyncio.run(measure(folder, policy, urls, args.rounds))
    result = {
        "ratio": statistics.median(item["ratio"] for item in rounds),
        "bound": 1.5,
        "bytes": rounds[0]["bytes"],
        "servers": args.servers,
        "seconds": statistics.median(item["seconds"] for item in rounds),
        "paused_seconds_max": max(max(item["paused_seconds"].values()) for item in rounds),
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps({name: result[name] for name in ("ratio", "seconds", "paused_seconds_max")}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["ratio"] > result["bound"])


if __name__ == "__main__":
    sys.exit(main())

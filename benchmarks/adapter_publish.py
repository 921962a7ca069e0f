#!/usr/bin/env python
"""How long a new version takes to the servers as an adapter, and as all weights of the same model.

    python benchmarks/adapter_publish.py --out benchmarks/results/adapter_publish.json

Both are published a few times, in turn, to embedded engines that sample all the while. The clock
starts when the weights stand in the trainer's memory and stops when every server has sampled a
token under them: export, fsync, the store, loading and (for all weights) the pause are in it.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from weight_sync import make_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.engines import engine_process, request
from support.tiny_tokenizer import write_tokenizer

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.inference.client import SGLangClient
from agentrl.models.adapter_files import AdapterShape
from agentrl.models.export import save_hf
from agentrl.models.lora import adapter_tensors, add_adapter, save_adapter, start_adapter
from agentrl.models.policy import PolicyModel
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.weight_sync import AdapterNames, PolicyPublisher

_PROMPT_TOKENS = 8
_NEW_TOKENS = 12
_RANK = 16


class Servers:
    """Engines that sample all the while, each with the newest version."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.adapter: str | None = None

    async def keep_sampling(self, url: str) -> None:
        """Keep a generation going on a server."""
        async with SGLangClient(url) as client:
            seed = 0
            while True:
                await client.generate(self._request(seed, _NEW_TOKENS))
                seed += 1

    async def until_sampling(self, url: str, version: int) -> None:
        """Return once a server has sampled a token with this version."""
        async with SGLangClient(url) as client:
            while (await client.generate(self._request(7, 1))).version_spans[-1].version != version:
                pass

    def _request(self, seed: int, num_tokens: int) -> Any:
        asked = request(seed, _PROMPT_TOKENS, max_new_tokens=num_tokens)
        return asked.model_copy(update={"adapter": self.adapter})


class Kind:
    """One way of publishing: a publisher and what it writes."""

    def __init__(
        self, store: TrajectoryStore, folder: Path, policy: PolicyModel, name: str
    ) -> None:
        self._store = store
        self._policy = policy
        self.name = name
        self.seconds: list[float] = []
        self.paused: list[float] = []
        self.num_bytes = 0
        self._publisher = PolicyPublisher(
            store,
            folder / name,
            publish=PublishSection(),
            inference=InferenceSection(),
            adapters=AdapterNames("bench") if name == "adapter" else None,
        )

    async def publish(self, servers: Servers, version: int) -> None:
        """Publish one version and note how long it took."""
        directory = self._publisher.directory(version)
        started = time.perf_counter()
        if self.name == "adapter":
            tensors = adapter_tensors(self._policy)
            save_adapter(self._policy, directory, tensors, dtype=torch.float32)
        else:
            save_hf(self._policy, directory)
        report = await self._publisher.announce(version)
        assert not report.failed, report.failed
        servers.adapter = (await self._store.services())[0].adapter
        await asyncio.gather(*(servers.until_sampling(url, version) for url in servers.urls))
        self.seconds.append(time.perf_counter() - started)
        self.paused += report.paused_seconds.values()
        await self._publisher.settle()
        policy = await self._store.latest_policy()
        assert policy is not None
        self.num_bytes = policy.num_bytes

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        return {
            "megabytes": round(self.num_bytes / 1e6, 1),
            "seconds": [round(s, 3) for s in self.seconds],
            "median_seconds": round(statistics.median(self.seconds), 3),
            "pause_seconds_median": round(statistics.median(self.paused), 3),
        }


async def measure(
    folder: Path, whole: PolicyModel, adapted: PolicyModel, urls: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Publish `rounds` versions in both ways."""
    servers = Servers(urls)
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("bench")) as store:
            await store.ensure_schema()
            await store.create_run(Run(name="bench"))
            for number, url in enumerate(urls):
                await store.register_service(
                    InferenceService(
                        id=f"s{number}", base_url=url, backend="embedded", model_path="m"
                    )
                )
            kinds = [Kind(store, folder, whole, "all"), Kind(store, folder, adapted, "adapter")]
            version = 0
            for kind in kinds:
                sampling = [asyncio.create_task(servers.keep_sampling(url)) for url in urls]
                for _ in range(rounds):
                    version += 1
                    await kind.publish(servers, version)
                for task in sampling:
                    task.cancel()
                await asyncio.gather(*sampling, return_exceptions=True)
    return {kind.name: kind.figures() for kind in kinds}


def main() -> None:
    """Measure and print (or write) the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, ExitStack() as stack:
        folder = Path(name)
        whole = make_policy(options.layers)
        save_hf(whole, folder / "model")
        write_tokenizer(folder / "model")
        adapted = make_policy(options.layers)
        shape = AdapterShape(_RANK, 32, ModelSection().lora_target_modules, str(folder / "model"))
        add_adapter(adapted.model, shape, dtype=torch.float32)
        start_adapter(adapted, seed=0)
        urls = [
            stack.enter_context(engine_process(folder / "model")) for _ in range(options.servers)
        ]
        found = asyncio.run(measure(folder, whole, adapted, urls, options.rounds))
    report = {
        "ratio": round(found["adapter"]["median_seconds"] / found["all"]["median_seconds"], 4),
        **found,
        "rank": _RANK,
        "servers": options.servers,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

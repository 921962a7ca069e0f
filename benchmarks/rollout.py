"""Measures the overhead of rollouts around the model, on one machine, in one run.

    python benchmarks/rollout.py

`throughput_ratio`: output tokens per second of 64 concurrent `MCPSampler` rollouts (database, MCP
tools and scoring included), relative to the same requests sent directly to the same engine by a
bare HTTP client: same concurrency, each rollout's turns in sequence, prefix cache emptied before
each side. Every round uses the same questions with the same seeds (`same_requests`: how many were
equal to the last token). The direct side runs before and after the sampler's, and the mean of the two
counts; `straight_to_straight` is the ratio between these equal sides, the noise of the measurement.
The result is the median of the rounds' ratios, after a warm-up round.

A side runs chains of requests, `CONCURRENCY` at a time. Only its middle counts: from the moment when as
many chains have ended as run concurrently, to the moment when the last chain starts. The burst of
claims and prefills at the start, and the decreasing concurrency at the end, are excluded.

The weight of a rollout's own work depends on the engine's cost of a turn, so the ratio is measured
over a `curve` of such costs (`engine_ms_a_turn`: the engine's time per turn with direct requests).
The engine is the embedded one with the demo's model and added layers that contribute nothing to the
residual stream: the same replies, with work proportional to the depth. The demo's model alone
(depth 1) costs 3 ms per turn, so its ratio mostly measures the sampler. Production turns cost more:
an 8B model that decodes 64 concurrent requests at 3,000 tokens per second spends 80 ms on a turn of
250 tokens. The headline is the ratio at `HEADLINE_DEPTH`, whose turns cost a quarter of that.

The engine has its own core, as a production server has its own machine; the sampler, the database
and the tool server share the rest. Its caches hold all concurrent rollouts, even while tools run:
otherwise, a deep model's prefixes would be evicted between two turns, and the benchmark would measure
prefills.

`cpu_ms_a_turn`: processor time of the sampler, the database and the tool server per model call and
its consequences. If they share one core, their sum limits the ratio (`highest_ratio_of_one_core`);
beyond it, a second sampler process needs another core. Run it on a quiet machine.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil
import torch
import uvloop
from harness.played import MODEL, open_store, play, rollout_context, served_by
from harness.processes import ROOT, engine_process, listening_process
from harness.results import parser, report
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections import DataSection, RolloutSection, SamplingSection
from agentrl.datasets.question_files import load_questions
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.inference import GenerateRequest, GenerateResult, ServerPool
from agentrl.inference.client.sglang_client import OnPartial, SGLangClient
from agentrl.inference.wire import request_body
from agentrl.rollout.worker.sampler_process import collect_less_garbage
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import McpToolBox, ToolsConfig, connect_tools, load_mcp_servers

CONCURRENCY = 64
DEPTHS = (1, 10, 20)
HEADLINE_DEPTH = 10
CACHES = ("--kv-cache-bytes", str(6 << 30), "--prefix-cache-bytes", str(6 << 30))
TOOL_SERVER = (sys.executable, "-m", "examples.shop.server", "--port", "{port}")
Chains = Mapping[str, Sequence[GenerateRequest]]
"""Every rollout's requests, in order."""


def deepened(target: Path, depth: int) -> Path:
    """Write the demo's model with additional layers whose outputs are all zero; return its path."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers *= depth
    config.layer_types = config.layer_types * depth
    deep: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    deep.load_state_dict(model.state_dict(), strict=False)
    for layer in deep.model.layers[model.config.num_hidden_layers :]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(projection.weight)
    shutil.copytree(MODEL, target, ignore=shutil.ignore_patterns("*.safetensors"))
    deep.save_pretrained(target)
    return target


def leave_a_core(flags: argparse.ArgumentParser) -> int:
    """Move this process and its children off a core for the engine; return the core."""
    *cores, engine_core = sorted(os.sched_getaffinity(0))
    if not cores:
        flags.error("two cores are needed: one for the engine and one for everything else")
    os.sched_setaffinity(0, cores)
    collect_less_garbage()  # as a sampler process does
    return engine_core


@contextmanager
def engine_on(core: int, model: Path) -> Iterator[str]:
    """Run the engine on this core; yields its address."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        os.sched_setaffinity(0, {core})  # children inherit it
        try:
            url = stack.enter_context(engine_process(model, *CACHES))
        finally:
            os.sched_setaffinity(0, cores)
        yield url


class Call(NamedTuple):
    """One request, in seconds of `time.perf_counter`."""

    chain: str
    began: float
    ended: float
    num_tokens: int
    """Sampled tokens."""


@dataclass(frozen=True)
class Middle:
    """A side at full concurrency."""

    seconds: float
    tokens_per_second: float
    turns_per_second: float

    @staticmethod
    def of(calls: Sequence[Call]) -> "Middle":
        """Return the middle of these calls.

        Raises:
            ValueError: there are too few chains.
        """
        begins: dict[str, float] = {}
        ends: dict[str, float] = {}
        for call in calls:
            begins[call.chain] = min(call.began, begins.get(call.chain, call.began))
            ends[call.chain] = max(call.ended, ends.get(call.chain, call.ended))
        if len(ends) <= 2 * CONCURRENCY:
            raise ValueError(f"{len(ends)} rollouts are too few to leave a middle to measure")
        begin, end = sorted(ends.values())[CONCURRENCY - 1], max(begins.values())
        inside = [call.num_tokens for call in calls if begin < call.ended <= end]
        seconds = end - begin
        return Middle(seconds, sum(inside) / seconds, len(inside) / seconds)


class RecordingPool(ServerPool):
    """Records every rollout's requests and their times."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: defaultdict[str, list[GenerateRequest]] = defaultdict(list)
        self.calls: list[Call] = []

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        on_partial: OnPartial | None = None,
        *,
        group: str | None = None,
    ) -> GenerateResult:
        """Sample and record the request."""
        self.asked[key].append(request)
        started = time.perf_counter()
        result = await super().generate(key, request, on_partial, group=group)
        self.calls.append(Call(key, started, time.perf_counter(), len(result.output_ids)))
        return result


@dataclass(frozen=True)
class Bench:
    """Runs either side."""

    mongo: EmbeddedMongo
    toolbox: McpToolBox
    engine: SGLangClient
    num_rollouts: int

    async def play(self) -> tuple[RecordingPool, dict[str, float]]:
        """Let a sampler run all rollouts; return their requests, and processor ms by process."""
        questions = load_questions(ROOT / "assets/demo/train.jsonl", DataSection())
        asked = questions[: self.num_rollouts // 4]
        pool = RecordingPool()
        rollout = RolloutSection(
            answer_instruction="none",  # the demo's model is trained without one
            max_turns=6,
            max_concurrent_samples_per_process=CONCURRENCY,
            target_concurrency=CONCURRENCY,
            exit_when_done=True,
        )
        sampling = SamplingSection(max_new_tokens=48, max_prompt_tokens=768)
        async with (
            open_store(self.mongo) as store,
            served_by(store, self.engine.base_url, pool),
        ):
            await store.tasks.add(tasks_from_questions(asked, "train", num_generations=4))
            await self.engine.flush_cache()
            before = cpu_seconds()
            await play(rollout_context(store, pool, self.toolbox, sampling, rollout))
            after = cpu_seconds()
        return pool, {name: 1000 * (after[name] - before[name]) / len(pool.calls) for name in after}

    async def replay(self, chains: Chains) -> Middle:
        """Send requests directly to the engine, those of a chain in sequence."""
        waiting = iter(chains.items())
        calls: list[Call] = []
        url = f"{self.engine.base_url}/generate"

        async def worker(client: aiohttp.ClientSession) -> None:
            for chain, requests in waiting:
                for request in requests:
                    started = time.perf_counter()
                    async with client.post(url, json=request_body(request)) as answer:
                        answer.raise_for_status()
                        num_tokens = len((await answer.json())["output_ids"])
                    calls.append(Call(chain, started, time.perf_counter(), num_tokens))

        await self.engine.flush_cache()
        connector = aiohttp.TCPConnector(limit=CONCURRENCY)
        async with aiohttp.ClientSession(connector=connector) as client:
            await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
        return Middle.of(calls)


def cpu_seconds() -> dict[str, float]:
    """Return the processor time so far of the processes on the cores not used by the engine."""
    own = psutil.Process()
    processes = {"sampler": own}
    for child in own.children(recursive=True):
        command = " ".join(child.cmdline())
        for name, mark in (("mongod", "mongod"), ("tool_server", TOOL_SERVER[2])):
            if mark in command:
                processes[name] = child
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def share_of_same(chains: Chains, others: Chains) -> float:
    """Return the share of requests of `chains` that equal those at the same places in `others`."""
    same = [
        np.array_equal(request.input_ids, other.input_ids) and request.sampling == other.sampling
        for name, requests in chains.items()
        for request, other in zip(requests, others.get(name, ()), strict=False)
    ]
    return sum(same) / sum(map(len, chains.values()))


async def compared(
    mongo: EmbeddedMongo, model: Path, engine_core: int, num_rollouts: int, num_rounds: int
) -> dict[str, Any]:
    """Compare both sides over some rounds, after a warm-up round of each."""
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        engine_url = stack.enter_context(engine_on(engine_core, model))
        tools_url = stack.enter_context(listening_process(TOOL_SERVER))
        tools = ToolsConfig(servers=load_mcp_servers(f"{tools_url}/mcp"))
        toolbox = await stack.enter_async_context(connect_tools(tools))
        engine = await stack.enter_async_context(SGLangClient(engine_url))
        bench = Bench(mongo, toolbox, engine, num_rollouts)
        requests = (await bench.play())[0].asked
        await bench.replay(requests)
        for _ in range(num_rounds):
            first = await bench.replay(requests)
            pool, cpu_ms = await bench.play()
            second = await bench.replay(requests)
            sampled = Middle.of(pool.calls)
            direct = (first.tokens_per_second + second.tokens_per_second) / 2
            rows.append(
                {
                    "ratio": sampled.tokens_per_second / direct,
                    "straight_to_straight": second.tokens_per_second / first.tokens_per_second,
                    "engine_ms": 2000 / (first.turns_per_second + second.turns_per_second),
                    "sampler_tokens_per_second": sampled.tokens_per_second,
                    "direct_tokens_per_second": direct,
                    "same_requests": share_of_same(pool.asked, requests),
                    "seconds_measured_a_side": sampled.seconds,
                    **{f"{name} ms": spent for name, spent in cpu_ms.items()},
                }
            )
            print(rows[-1], flush=True)
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    cpu_ms = {name[:-3]: middle.pop(name) for name in [*middle] if name.endswith(" ms")}
    engine_ms = middle.pop("engine_ms")
    return {
        "throughput_ratio": middle.pop("ratio"),
        "ratios": [row["ratio"] for row in rows],
        "engine_ms_a_turn": engine_ms,
        "cpu_ms_a_turn": cpu_ms,
        "highest_ratio_of_one_core": min(1.0, engine_ms / sum(cpu_ms.values())),
        **middle,
        "rollouts_a_side": num_rollouts,
    }


async def measure(
    engine_core: int, num_rollouts: int, num_rounds: int, depths: Sequence[int]
) -> dict[str, Any]:
    """Return all figures."""
    curve = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        for depth in depths:
            model = deepened(Path(folder) / f"model{depth}", depth)
            found = await compared(mongo, model, engine_core, num_rollouts, num_rounds)
            curve[f"depth_{depth}"] = found
    headline = curve[f"depth_{HEADLINE_DEPTH}"]
    names = ("throughput_ratio", "straight_to_straight", "engine_ms_a_turn")
    return {**{name: headline[name] for name in names}, "curve": curve}


def main() -> None:
    """Measure and write."""
    flags = parser(__doc__, "rollout")
    flags.add_argument("--rollouts", type=int, default=256, help="rollouts per side")
    flags.add_argument("--rounds", type=int, default=4)
    flags.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    core = leave_a_core(flags)
    report(
        flags, lambda given: uvloop.run(measure(core, given.rollouts, given.rounds, given.depths))
    )


if __name__ == "__main__":
    main()

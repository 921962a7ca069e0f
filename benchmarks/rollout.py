#!/usr/bin/env python
"""What rollouts cost beside the model, on the machine at hand, in one run.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

`throughput_ratio`: output tokens a second of 64 concurrent `MCPSampler` rollouts (database, MCP
tools and scoring included), over those of the same requests sent straight to the same engine by a
bare HTTP client: as many at once, each rollout's turns one after the other, prefix cache emptied
before either side. Sides alternate, and the median over the rounds counts.

The demo's model is far cheaper than any model that one would train: a turn of ten tokens costs the
engine 3 ms, so what is measured with it (`demo_model`) is mostly the sampler. The ratio is taken
with the same weights below layers that add nothing to the residual stream: the same replies, for
`DEPTH` times the work. A turn then costs the engine about 20 ms.

`sampler_cpu_ms_a_turn`: processor time of this process a model call, tool call and writes included.

`waiting`: one process holds 512 rollouts that all wait for a slow tool; its memory at the beginning
and at the end of the wait.

Run it on a quiet machine.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
import uvloop
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.engines import engine_process
from support.listening import listening_process
from support.play import ExactScoring, run_tool_server, service
from support.scripted_engine import ScriptedEngine, serve_script

from agentrl import __version__
from agentrl.config.sections import DataSection, RolloutSection, SamplingSection
from agentrl.inference import GenerateRequest, GenerateResult, ServerPool
from agentrl.inference.client import OnPartial, SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.datasets import load_questions, tasks_from_questions
from agentrl.rollout.loop import SamplingLoop
from agentrl.sampler.scoring import RegisteredScoring
from agentrl.schema import InferenceService, MCPTask, Run, utc_now
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets/demo/model"
CONCURRENCY = 64
DEPTH = 10
WAITING = 512
WAIT_SECONDS = 20.0


class RecordingPool(ServerPool):
    """Keeps what every rollout asked, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: defaultdict[str, list[GenerateRequest]] = defaultdict(list)
        self.num_tokens = 0

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        on_partial: OnPartial | None = None,
        *,
        group: str | None = None,
    ) -> GenerateResult:
        """Sample, and keep what was asked."""
        result = await super().generate(key, request, on_partial, group=group)
        self.asked[key].append(request)
        self.num_tokens += len(result.output_ids)
        return result


def deepened(target: Path) -> Path:
    """Write the demo's model with further layers whose outputs are all zero; return where."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers *= DEPTH
    config.layer_types = config.layer_types * DEPTH
    deep: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    deep.load_state_dict(model.state_dict(), strict=False)
    for layer in deep.model.layers[model.config.num_hidden_layers :]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(projection.weight)
    shutil.copytree(MODEL, target, ignore=shutil.ignore_patterns("*.safetensors"))
    deep.save_pretrained(target)
    return target


@asynccontextmanager
async def open_store(mongo: EmbeddedMongo) -> AsyncIterator[TrajectoryStore]:
    """Yield an empty store of its own."""
    async with TrajectoryStore.connect(mongo.uri(f"bench_{uuid.uuid4().hex[:8]}")) as store:
        await store.ensure_schema()
        await store.create_run(Run(name="bench", status="training", admitted_groups=1_000_000))
        yield store
        await store.drop_database()


async def play(store: TrajectoryStore, base: RolloutContext) -> float:
    """Play all tasks of the store; return the seconds from the first claim to the last score."""
    loop = SamplingLoop(replace(base, store=store), "bench", MCPSampler)
    began = time.perf_counter()
    await loop.run(asyncio.Event(), asyncio.Event())
    return time.perf_counter() - began


async def replay(url: str, chains: Sequence[Sequence[GenerateRequest]]) -> tuple[float, int]:
    """Send the same requests straight to the engine; return seconds and output tokens."""
    waiting = iter(chains)
    num_tokens = 0

    async def worker(client: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        for chain in waiting:
            for request in chain:
                sampling = request.sampling.model_dump(exclude={"seed"})
                sampling["sampling_seed"] = request.sampling.seed
                sampling["stop_token_ids"] = list(request.sampling.stop_token_ids)
                body = {
                    "input_ids": request.input_ids.tolist(),
                    "sampling_params": sampling,
                    "return_logprob": True,
                }
                async with client.post(f"{url}/generate", json=body) as answer:
                    answer.raise_for_status()
                    num_tokens += len((await answer.json())["output_ids"])

    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as client:
        began = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
        return time.perf_counter() - began, num_tokens


async def throughput(
    mongo: EmbeddedMongo, model: Path, num_rollouts: int, rounds: int
) -> dict[str, Any]:
    """Compare both sides over some rounds."""
    questions = load_questions(ROOT / "assets/demo/train.jsonl", DataSection())
    command = [sys.executable, "-m", "examples.shop.server", "--port", "{port}"]
    sampled, straight, cpu_ms = [], [], []
    with engine_process(model) as engine_url, listening_process(command) as tools_url:
        here = InferenceService(
            id="engine", base_url=engine_url, backend="embedded", model_path=str(model)
        )
        tools = ToolsConfig(servers=load_mcp_servers(f"{tools_url}/mcp"))
        async with connect_tools(tools) as toolbox, SGLangClient(engine_url) as engine:
            for number in range(rounds + 1):
                async with open_store(mongo) as store, RecordingPool() as pool:
                    tasks = tasks_from_questions(
                        questions[: num_rollouts // 4], "train", num_generations=4
                    )
                    await store.add_tasks(tasks)
                    context = RolloutContext(
                        store=store,
                        servers=pool,
                        renderer=Renderer.load(MODEL),
                        toolbox=toolbox,
                        scoring=RegisteredScoring(),
                        rollout=RolloutSection(
                            max_turns=6,
                            max_concurrent_samples_per_process=CONCURRENCY,
                            exit_when_done=True,
                        ),
                        sampling=SamplingSection(max_new_tokens=48, max_prompt_tokens=768),
                        seed=number,
                    )
                    await engine.flush_cache()
                    cpu_seconds = time.process_time()
                    async with kept_registered(store, here):
                        seconds = await play(store, context)
                    cpu_seconds = time.process_time() - cpu_seconds
                    chains, num_tokens = list(pool.asked.values()), pool.num_tokens
                await engine.flush_cache()
                direct_seconds, direct_tokens = await replay(engine_url, chains)
                if number == 0:
                    continue  # warm-up
                sampled.append(num_tokens / seconds)
                straight.append(direct_tokens / direct_seconds)
                cpu_ms.append(cpu_seconds * 1000 / sum(map(len, chains)))
                print(f"round {number}: {sampled[-1]:.0f} of {straight[-1]:.0f} tokens/s")
    ratios = [mine / direct for mine, direct in zip(sampled, straight, strict=True)]
    return {
        "throughput_ratio": statistics.median(ratios),
        "ratios": ratios,
        "sampler_tokens_per_second": statistics.median(sampled),
        "direct_tokens_per_second": statistics.median(straight),
        "sampler_cpu_ms_a_turn": statistics.median(cpu_ms),
        "concurrency": CONCURRENCY,
        "rollouts_a_round": num_rollouts,
    }


@asynccontextmanager
async def kept_registered(store: TrajectoryStore, here: InferenceService) -> AsyncIterator[None]:
    """Register a server, and send its heartbeats."""

    async def beat() -> None:
        while True:
            await store.register_service(here.model_copy(update={"heartbeat_at": utc_now()}))
            await asyncio.sleep(5)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.wait([beats])


async def waiting(mongo: EmbeddedMongo, num_waiting: int) -> dict[str, Any]:
    """Hold rollouts that wait for a slow tool, and watch this process's memory."""
    with (
        tempfile.NamedTemporaryFile() as calls,
        run_tool_server(Path(calls.name)) as tools_url,
        serve_script(Renderer.load(MODEL), _call_slowly) as engine,
    ):
        return await _hold(mongo, engine, tools_url, Path(calls.name), num_waiting)


def _call_slowly(prompt: str) -> str:
    call = json.dumps({"name": "slow", "arguments": {"seconds": WAIT_SECONDS}})
    done = "<tool_response>" in prompt.rpartition("<|im_start|>assistant")[0].partition("wait!")[2]
    return "<answer>1</answer>" if done else f"<tool_call>\n{call}\n</tool_call>"


async def _hold(
    mongo: EmbeddedMongo, engine: ScriptedEngine, tools_url: str, calls: Path, num_waiting: int
) -> dict[str, Any]:
    tools = ToolsConfig(servers=load_mcp_servers(tools_url), call_timeout_seconds=600)
    async with open_store(mongo) as store, connect_tools(tools) as toolbox, ServerPool() as pool:
        await store.add_tasks(
            MCPTask(id=f"train/0/{n}", order=n, num_generations=8, query="wait!", answer="1")
            for n in range(num_waiting // 8)
        )
        context = RolloutContext(
            store=store,
            servers=pool,
            renderer=engine.renderer,
            toolbox=toolbox,
            scoring=ExactScoring(),
            rollout=RolloutSection(
                max_concurrent_samples_per_process=num_waiting,
                target_concurrency=num_waiting,
                exit_when_done=True,
            ),
            sampling=SamplingSection(max_new_tokens=200),
        )
        before = resident_mb()
        async with kept_registered(store, service(engine)):
            playing = asyncio.create_task(play(store, context))
            await _until_called(calls, num_waiting, playing)
            samples = [resident_mb()]
            for _ in range(round(WAIT_SECONDS / 2)):
                await asyncio.sleep(1.0)
                samples.append(resident_mb())
            seconds = await playing
    return {
        "rollouts": num_waiting,
        "resident_mb_before": before,
        "resident_mb_waiting": samples,
        "growth_mb_while_waiting": samples[-1] - samples[0],
        "kb_a_rollout": (samples[0] - before) * 1024 / num_waiting,
        "seconds": seconds,
    }


async def _until_called(calls: Path, count: int, playing: asyncio.Task[float]) -> None:
    while not playing.done():
        text = await asyncio.to_thread(calls.read_text)
        if text.count("\n") >= count:
            return
        await asyncio.wait([playing], timeout=0.2)


def resident_mb() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(num_rollouts: int, rounds: int, num_waiting: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        held = await waiting(mongo, num_waiting)
        print(f"{num_waiting} waiting rollouts: {held['growth_mb_while_waiting']:+.1f} MB")
        deep = deepened(Path(folder) / "model")
        figures = await throughput(mongo, deep, num_rollouts, rounds)
        demo_model = await throughput(mongo, MODEL, num_rollouts, rounds)
    return {
        **figures,
        "depth": DEPTH,
        "demo_model": demo_model,
        "waiting": held,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"agentrl": __version__, "python": platform.python_version()},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, default=WAITING)
    args = parser.parse_args()
    figures = uvloop.run(measure(args.rollouts, args.rounds, args.waiting))
    text = json.dumps(figures, indent=2) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

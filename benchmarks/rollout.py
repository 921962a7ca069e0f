#!/usr/bin/env python
"""What rollouts cost beside the model, on the machine at hand, in one run.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

`throughput_ratio`: output tokens a second of 64 concurrent `MCPSampler` rollouts (database, MCP
tools and scoring included), over those of the same requests sent straight to the same engine by a
bare HTTP client: as many at once, each rollout's turns one after the other, prefix cache emptied
before either side. Sides alternate, only the middle of each counts (`rollout_rounds.py`), and of
the rounds' ratios the median.

How much a rollout's own work weighs depends on what a turn costs the engine, so the ratio is taken
over a `curve` of such costs (`engine_ms_a_turn`: the engine's seconds a turn when asked straight).
The engine is the embedded one with the demo's model below layers that add nothing to the residual
stream: the same replies, for as many times the work as it is deep. The demo's model alone (depth 1)
costs 3 ms a turn, and what is measured with it is mostly the sampler. In life a turn costs more: an
8B model that is decoded 64 requests at a time at 3,000 tokens a second spends 80 ms on a turn of 250
tokens. The headline is the ratio at `HEADLINE_DEPTH`.

The engine has a core to itself, as a server in life has its own machine; the sampler, the database
and the tool server share what is left. Its caches hold everything that is played at once, also
while tools work: otherwise a deep model's prefixes would be thrown out between two turns, and what
is measured would be prefills.

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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvloop
from rollout_rounds import CONCURRENCY, Middle, RecordingPool, median, replay
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.engines import engine_process
from support.listening import listening_process
from support.play import ExactScoring, run_tool_server, service
from support.scripted_engine import ScriptedEngine, serve_script

from agentrl import __version__
from agentrl.config.sections import DataSection, RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.inference.client import SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler, RolloutContext
from agentrl.rollout.datasets import load_questions, tasks_from_questions
from agentrl.rollout.loop import SamplingLoop
from agentrl.sampler.scoring import RegisteredScoring
from agentrl.schema import InferenceService, MCPTask, Run, utc_now
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.tools import McpToolBox, ToolsConfig, connect_tools, load_mcp_servers

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets/demo/model"
DEPTHS = (1, 10, 20, 40)
HEADLINE_DEPTH = 10
CACHES = ("--kv-cache-bytes", str(6 << 30), "--prefix-cache-bytes", str(6 << 30))
WAITING = 512
WAIT_SECONDS = 20.0


def deepened(target: Path, depth: int) -> Path:
    """Write the demo's model with further layers whose outputs are all zero; return where."""
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


@asynccontextmanager
async def open_store(mongo: EmbeddedMongo) -> AsyncIterator[TrajectoryStore]:
    """Yield an empty store of its own."""
    async with TrajectoryStore.connect(mongo.uri(f"bench_{uuid.uuid4().hex[:8]}")) as store:
        await store.ensure_schema()
        await store.create_run(Run(name="bench", status="training", admitted_groups=1_000_000))
        yield store
        await store.drop_database()


async def play(store: TrajectoryStore, base: RolloutContext) -> None:
    """Play all tasks of the store."""
    loop = SamplingLoop(replace(base, store=store), "bench", MCPSampler)
    await loop.run(asyncio.Event(), asyncio.Event())


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


async def throughput(
    mongo: EmbeddedMongo, model: Path, engine_core: int, num_rollouts: int, rounds: int
) -> dict[str, Any]:
    """Compare both sides over some rounds."""
    command = [sys.executable, "-m", "examples.shop.server", "--port", "{port}"]
    sampled, straight, cpu_ms = [], [], []
    with engine_on(engine_core, model) as engine_url, listening_process(command) as tools_url:
        here = InferenceService(
            id="engine", base_url=engine_url, backend="embedded", model_path=str(model)
        )
        tools = ToolsConfig(servers=load_mcp_servers(f"{tools_url}/mcp"))
        async with connect_tools(tools) as toolbox, SGLangClient(engine_url) as engine:
            for number in range(rounds + 1):
                async with open_store(mongo) as store, RecordingPool() as pool:
                    base = rollout_context(store, pool, toolbox, seed=number)
                    warm_up = number == 0
                    await store.add_tasks(tasks(3 * CONCURRENCY if warm_up else num_rollouts))
                    await engine.flush_cache()
                    cpu_seconds = time.process_time()
                    async with kept_registered(store, here):
                        await play(store, base)
                    cpu_seconds = time.process_time() - cpu_seconds
                await engine.flush_cache()
                direct = Middle.of(await replay(engine_url, pool.asked))
                if warm_up:
                    continue
                sampled.append(Middle.of(pool.calls))
                straight.append(direct)
                cpu_ms.append(cpu_seconds * 1000 / len(pool.calls))
                print(
                    f"round {number}: {sampled[-1].tokens_per_second:.0f} of "
                    f"{direct.tokens_per_second:.0f} tokens/s, {sampled[-1].in_flight:.1f} of "
                    f"{direct.in_flight:.1f} in flight, {cpu_ms[-1]:.2f} ms",
                    flush=True,
                )
    ratios = [
        mine.tokens_per_second / direct.tokens_per_second
        for mine, direct in zip(sampled, straight, strict=True)
    ]
    return {
        "throughput_ratio": statistics.median(ratios),
        "ratios": ratios,
        "engine_ms_a_turn": 1000 / median(straight, "turns_per_second"),
        "sampler_tokens_per_second": median(sampled, "tokens_per_second"),
        "direct_tokens_per_second": median(straight, "tokens_per_second"),
        "sampler_requests_in_flight": median(sampled, "in_flight"),
        "direct_requests_in_flight": median(straight, "in_flight"),
        "sampler_cpu_ms_a_turn": statistics.median(cpu_ms),
        "seconds_measured_a_round": median(sampled, "seconds"),
        "concurrency": CONCURRENCY,
        "rollouts_a_round": num_rollouts,
    }


def tasks(num_rollouts: int) -> list[MCPTask]:
    """Return the demo's first questions, in groups of four."""
    questions = load_questions(ROOT / "assets/demo/train.jsonl", DataSection())
    return list(tasks_from_questions(questions[: num_rollouts // 4], "train", num_generations=4))


def rollout_context(
    store: TrajectoryStore, pool: ServerPool, toolbox: McpToolBox, seed: int
) -> RolloutContext:
    """Return what the rollouts of a round share."""
    return RolloutContext(
        store=store,
        servers=pool,
        renderer=Renderer.load(MODEL),
        toolbox=toolbox,
        scoring=RegisteredScoring(),
        rollout=RolloutSection(
            max_turns=6,
            max_concurrent_samples_per_process=CONCURRENCY,
            target_concurrency=CONCURRENCY,
            exit_when_done=True,
        ),
        sampling=SamplingSection(max_new_tokens=48, max_prompt_tokens=768),
        seed=seed,
    )


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
            began = time.perf_counter()
            await _until_called(calls, num_waiting, playing)
            samples = [resident_mb()]
            for _ in range(round(WAIT_SECONDS / 2)):
                await asyncio.sleep(1.0)
                samples.append(resident_mb())
            await playing
            seconds = time.perf_counter() - began
    return {
        "rollouts": num_waiting,
        "resident_mb_before": before,
        "resident_mb_waiting": samples,
        "growth_mb_while_waiting": samples[-1] - samples[0],
        "kb_a_rollout": (samples[0] - before) * 1024 / num_waiting,
        "seconds": seconds,
    }


async def _until_called(calls: Path, count: int, playing: asyncio.Task[None]) -> None:
    while not playing.done():
        text = await asyncio.to_thread(calls.read_text)
        if text.count("\n") >= count:
            return
        await asyncio.wait([playing], timeout=0.2)


def resident_mb() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(
    engine_core: int, num_rollouts: int, rounds: int, depths: Sequence[int], num_waiting: int
) -> dict[str, Any]:
    """Return all figures."""
    curve = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        held = await waiting(mongo, num_waiting)
        print(f"{num_waiting} waiting rollouts: {held['growth_mb_while_waiting']:+.1f} MB")
        for depth in depths:
            print(f"depth {depth}", flush=True)
            model = deepened(Path(folder) / f"model{depth}", depth)
            curve[depth] = await throughput(mongo, model, engine_core, num_rollouts, rounds)
    return {
        "throughput_ratio": curve[HEADLINE_DEPTH]["throughput_ratio"],
        "engine_ms_a_turn": curve[HEADLINE_DEPTH]["engine_ms_a_turn"],
        "curve": {f"depth_{depth}": figures for depth, figures in curve.items()},
        "waiting": held,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"agentrl": __version__, "python": platform.python_version()},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--rollouts", type=int, default=384, help="rollouts a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--waiting", type=int, default=WAITING)
    args = parser.parse_args()
    if HEADLINE_DEPTH not in args.depths:
        parser.error(f"--depths must contain {HEADLINE_DEPTH}, of which the headline is")
    *cores, engine_core = sorted(os.sched_getaffinity(0))
    if not cores:
        parser.error("two cores are needed: one for the engine, and one for all else")
    os.sched_setaffinity(0, cores)
    figures = uvloop.run(
        measure(engine_core, args.rollouts, args.rounds, args.depths, args.waiting)
    )
    text = json.dumps(figures, indent=2) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

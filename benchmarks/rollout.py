#!/usr/bin/env python
"""Measures the overhead of rollouts around the model, on one machine, in one run.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

`throughput_ratio`: output tokens per second of 64 concurrent `MCPSampler` rollouts (database, MCP
tools and scoring included), relative to the same requests sent directly to the same engine by a
bare HTTP client: same concurrency, each rollout's turns in sequence, prefix cache emptied before
each side. Every round uses the same questions with the same seeds (`same_requests`: how many were
equal to the last token). One warm-up round of each side does not count. The direct side runs twice
per round: `straight_to_straight` is the ratio between these equal sides. The sampler is compared
with the mean of the two; the order of the sides alternates, only the middle of each counts
(`rollout_rounds.py`), and the result is the median of the rounds' ratios.

The weight of a rollout's own work depends on the engine's cost of a turn, so the ratio is measured
over a `curve` of such costs (`engine_ms_a_turn`: the engine's time per turn with direct requests).
The engine is the embedded one with the demo's model and added layers that contribute nothing to the
residual stream: the same replies, with work proportional to the depth. The demo's model alone
(depth 1) costs 3 ms per turn, so its ratio mostly measures the sampler. Production turns cost more:
an 8B model that decodes 64 concurrent requests at 3,000 tokens per second spends 80 ms on a turn of
250 tokens. The headline is the ratio at `HEADLINE_DEPTH`, whose turns cost a quarter of that.

The engine has its own core, as a production server has its own machine; the sampler, the database
and the tool server share the rest. That does not isolate them completely: cores share caches, and
virtual cores may be two threads of one physical core. The requests are therefore also sent directly
while other work keeps the remaining cores as busy as the sampler's side does
(`rollout_neighbour.py`); `beside_equal_work` has the ratio to these, and the slowdown of the engine
by such work alone.

The engine's caches hold all concurrent rollouts, even while tools run: otherwise, a deep model's
prefixes would be evicted between two turns, and the benchmark would measure prefills.

`cpu_ms_a_turn`: processor time of the sampler, the database and the tool server per model call and
its consequences. If they share one core, their sum limits the ratio (`highest_ratio_of_one_core`);
beyond it, a second sampler process needs another core.

`waiting`: one process holds 512 rollouts that all wait for a slow tool; its memory at the start and
at the end of the wait.

Run it on a quiet machine.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from harness.processes import engine_process, listening_process
from harness.server_heartbeats import kept_registered
from rollout_neighbour import busy
from rollout_play import MODEL, deepened, open_store, play
from rollout_rounds import (
    CONCURRENCY,
    Call,
    Chains,
    Middle,
    RecordingPool,
    Round,
    figures,
    num_same,
    replay,
)
from rollout_waiting import waiting

from agentrl import __version__
from agentrl.config.sections import DataSection, RolloutSection, SamplingSection
from agentrl.datasets.question_files import load_questions
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.inference import ServerPool
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.rollout.worker.sampler_process import collect_less_garbage
from agentrl.schema import InferenceService, MCPTask
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import McpToolBox, ToolsConfig, connect_tools, load_mcp_servers

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (1, 10, 20)
HEADLINE_DEPTH = 10
CACHES = ("--kv-cache-bytes", str(6 << 30), "--prefix-cache-bytes", str(6 << 30))
TOOL_SERVER = (sys.executable, "-m", "examples.shop.server", "--port", "{port}")
WAITING = 512


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
    mongo: EmbeddedMongo, model: Path, engine_core: int, num_rollouts: int, num_rounds: int
) -> dict[str, Any]:
    """Compare both sides over some rounds, after a warm-up round of each."""
    rounds = []
    async with AsyncExitStack() as stack:
        engine_url = stack.enter_context(engine_on(engine_core, model))
        tools_url = stack.enter_context(listening_process(TOOL_SERVER))
        tools = ToolsConfig(servers=load_mcp_servers(f"{tools_url}/mcp"))
        bench = Bench(
            mongo,
            await stack.enter_async_context(connect_tools(tools)),
            await stack.enter_async_context(SGLangClient(engine_url)),
            InferenceService(
                id="engine", base_url=engine_url, backend="embedded", model_path=str(model)
            ),
            num_rollouts,
        )
        warm_up = await bench.play()
        await bench.replay(warm_up.asked)
        for number in range(num_rounds):
            rounds.append(await bench.round(warm_up, sampler_first=number % 2 == 0))
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    return {
        **figures(rounds),
        "concurrency": CONCURRENCY,
        "rollouts_a_side": num_rollouts,
        "rounds": num_rounds,
    }


@dataclass(frozen=True)
class Played:
    """Results of a sampler's side."""

    asked: Chains
    calls: list[Call]
    cpu_ms_a_turn: dict[str, float]
    busy_share: float
    """Share of the time in which the cores not used by the engine were busy."""


@dataclass(frozen=True)
class Bench:
    """Runs either side."""

    mongo: EmbeddedMongo
    toolbox: McpToolBox
    engine: SGLangClient
    service: InferenceService
    num_rollouts: int

    async def round(self, warm_up: Played, *, sampler_first: bool) -> Round:
        """Measure all sides once; the direct sides replay the sampler's requests."""
        requests = warm_up.asked
        if sampler_first:
            played = await self.play()
            beside_work = await self.replay_beside(played.busy_share, requests)
            straight, straight_again = await self.replay(requests), await self.replay(requests)
        else:
            straight_again, straight = await self.replay(requests), await self.replay(requests)
            beside_work = await self.replay_beside(warm_up.busy_share, requests)
            played = await self.play()
        return Round(
            sampled=Middle.of(played.calls),
            straight=straight,
            again=straight_again,
            beside=beside_work,
            cpu_ms_a_turn=played.cpu_ms_a_turn,
            num_same=num_same(played.asked, requests),
            num_turns=len(played.calls),
        )

    async def play(self) -> Played:
        """Let a sampler run all rollouts, in a fresh database."""
        async with open_store(self.mongo) as store, RecordingPool() as pool:
            await store.tasks.add(tasks(self.num_rollouts))
            await self.engine.flush_cache()
            before, started = cpu_seconds(), time.perf_counter()
            async with kept_registered(store, self.service):
                await play(store, rollout_context(store, pool, self.toolbox))
            spent = {name: after - before[name] for name, after in cpu_seconds().items()}
            seconds = time.perf_counter() - started
        return Played(
            asked=pool.asked,
            calls=pool.calls,
            cpu_ms_a_turn={name: cpu * 1000 / len(pool.calls) for name, cpu in spent.items()},
            busy_share=sum(spent.values()) / seconds,
        )

    async def replay(self, requests: Chains) -> Middle:
        """Send the requests directly to the engine."""
        await self.engine.flush_cache()
        return Middle.of(await replay(self.engine.base_url, requests))

    async def replay_beside(self, busy_share: float, requests: Chains) -> Middle:
        """Send the requests directly while the other cores are busy for this share of the time."""
        with busy(busy_share):
            return await self.replay(requests)


def cpu_seconds() -> dict[str, float]:
    """Return the processor time so far of the processes on the cores not used by the engine."""
    own = psutil.Process()
    processes = {"sampler": own}
    for child in own.children(recursive=True):
        command = " ".join(child.cmdline())
        for name, mark in (("mongod", "mongod"), ("tool_server", TOOL_SERVER[2])):
            if mark in command and "agentrl.inference" not in command:
                processes[name] = child
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def tasks(num_rollouts: int) -> list[MCPTask]:
    """Return the demo's first questions, in groups of four."""
    questions = load_questions(ROOT / "assets/demo/train.jsonl", DataSection())
    return list(tasks_from_questions(questions[: num_rollouts // 4], "train", num_generations=4))


def rollout_context(
    store: TrajectoryStore, pool: ServerPool, toolbox: McpToolBox
) -> RolloutContext:
    """Return what all rollouts share."""
    return RolloutContext(
        store=store,
        servers=pool,
        renderer=Renderer.load(MODEL),
        toolbox=toolbox,
        scoring=RegisteredScoring(),
        rollout=RolloutSection(
            answer_instruction="none",  # the demo's model is trained without one
            max_turns=6,
            max_concurrent_samples_per_process=CONCURRENCY,
            target_concurrency=CONCURRENCY,
            exit_when_done=True,
        ),
        sampling=SamplingSection(max_new_tokens=48, max_prompt_tokens=768),
    )


async def measure(
    engine_core: int, num_rollouts: int, num_rounds: int, depths: Sequence[int], num_waiting: int
) -> dict[str, Any]:
    """Return all figures."""
    curve = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        held = await waiting(mongo, num_waiting)
        print(f"{num_waiting} waiting rollouts: {held['growth_mb_while_waiting']:+.1f} MB")
        for depth in depths:
            print(f"depth {depth}", flush=True)
            model = deepened(Path(folder) / f"model{depth}", depth)
            curve[depth] = await throughput(mongo, model, engine_core, num_rollouts, num_rounds)
    headline = curve[HEADLINE_DEPTH]
    return {
        "throughput_ratio": headline["throughput_ratio"],
        "throughput_ratio_beside_equal_work": headline["beside_equal_work"]["throughput_ratio"],
        "straight_to_straight": headline["straight_to_straight"]["median"],
        "engine_ms_a_turn": headline["engine_ms_a_turn"],
        "curve": {f"depth_{depth}": measured for depth, measured in curve.items()},
        "waiting": held,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"agentrl": __version__, "python": platform.python_version()},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts per side")
    parser.add_argument("--rounds", type=int, default=4, help="preferably an even number")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--waiting", type=int, default=WAITING)
    args = parser.parse_args()
    if HEADLINE_DEPTH not in args.depths:
        parser.error(f"--depths must contain {HEADLINE_DEPTH}, the depth of the headline figure")
    *cores, engine_core = sorted(os.sched_getaffinity(0))
    if not cores:
        parser.error("two cores are needed: one for the engine and one for everything else")
    os.sched_setaffinity(0, cores)
    collect_less_garbage()  # as a sampler process does
    measured = uvloop.run(
        measure(engine_core, args.rollouts, args.rounds, args.depths, args.waiting)
    )
    text = json.dumps(measured, indent=2) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

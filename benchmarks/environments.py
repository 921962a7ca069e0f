#!/usr/bin/env python
"""Rollouts a second by `--env`, over those of the environment's own loop on the same engine.

    python benchmarks/environments.py --out benchmarks/results/environments.json

For each kind: `by_env`, where a sampler claims, records and scores the rollouts of an environment in
its own process; and `own_loop`, where the same process plays the same tasks, as many at once, at a
plain OpenAI endpoint over the same engine, without database and without recording. Replies are greedy,
so both sides ask the same, and the engine's prefix cache is emptied before either side. Sides change
places from round to round; `ratio` is the median of the rounds' ratios.

What counts of a side is its middle: from the end of as many rollouts as are played at once to the end
of the last one that begins while as many are under way. Starting and ending cost a process once, not a
rollout. The engine has a core to itself, as a server in life has its own machine, and serves the demo's
model below layers that add nothing, so that a turn costs about a quarter of what a turn of an 8B model
does, some 20 ms (both as in `rollout.py`). The tiny model's replies to these environments are short, four
tokens in a game of TextArena: `engine_ms_a_turn`, the engine's processor time, says whether that holds.
Where it does not, the figures compare what surrounds the model with itself. Run it on a quiet machine.

A kind is measured where `scripts/setup_agents KIND .agentrl/environments/KIND` has put it; Harbor's tasks
need no package, and are written for the measurement. OpenEnv's actions are JSON, which the tiny model
writes none of, so that its episodes never end. The file keeps the kinds that a run leaves out.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from harness.machine import machine
from rollout import engine_on
from rollout_play import MODEL, deepened, kept_registered, open_store

from agentrl.config.sections import AgentSection, DataSection, RolloutSection, SamplingSection
from agentrl.datasets.task_stream import tasks_of_environment
from agentrl.environments import EnvironmentProcess, EnvironmentUri
from agentrl.inference import GenerateRequest, ServerPool
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.dialects.api_server import APIServer
from agentrl.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.rollout.agent import AgentEndpointServer, EnvironmentProcesses
from agentrl.rollout.worker.sampler_process import collect_less_garbage
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.schema import EnvironmentTask, InferenceService
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools

KINDS = {
    "reasoning_gym": "reasoning_gym:leg_counting?max_animals=4&seed=1&size={size}",
    "textarena": "textarena:GuessTheNumber-v0?seed=1&size={size}",
    "harbor": "harbor:{folder}?runtime=process",
    "verifiers": "verifiers:sums_taskset?size={size}",
}
PACKAGES = Path(__file__).parent / "harness/environments"
CONCURRENCY = 16
DEPTH = 20


def middle_rate(ends: Sequence[float]) -> float:
    """Return the rollouts a second while `CONCURRENCY` were under way, from the times of their ends."""
    middle = sorted(ends)[CONCURRENCY - 1 : len(ends) - CONCURRENCY]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def section() -> DataSection:
    """Return the settings of all kinds: uv, by which verifiers installs its program, is the user's."""
    return DataSection(
        env_variables=("PYTHONPATH", *(n for n in os.environ if n.startswith("UV_")))
    )


async def own_loop(
    uri: EnvironmentUri, base: RolloutContext, tasks: Sequence[EnvironmentTask]
) -> float:
    """Return the rollouts a second without recording."""
    ends: list[float] = []

    async def reply(messages: list[Any], tools: list[Any]) -> EngineReply:
        ids = base.renderer.render(messages, tools)
        request = GenerateRequest(input_ids=ids, sampling=base.sampling_params("train"))
        result = await base.servers.generate("bench", request, None, group="bench")
        text = base.renderer.parse(result.output_ids).content
        return EngineReply(text, (), len(ids), len(result.output_ids))

    room = asyncio.Semaphore(CONCURRENCY)
    with EnvironmentProcess(uri, section(), quiet=True) as environment:
        environment.size()
        async with APIServer.open("127.0.0.1") as server:

            async def play(task: EnvironmentTask) -> None:
                async with room, server.serve(EngineSession("policy", reply)) as endpoint:
                    await environment.play(task.row, endpoint)
                    ends.append(time.time())

            await asyncio.gather(*map(play, tasks))
    return middle_rate(ends)


async def by_env(
    mongo: EmbeddedMongo,
    here: InferenceService,
    base: RolloutContext,
    tasks: Sequence[EnvironmentTask],
) -> float:
    """Return the rollouts a second of a sampler."""
    async with open_store(mongo) as store, AgentEndpointServer.open(AgentSection(), "m") as server:
        with EnvironmentProcesses.open(section(), server) as environments:
            first = environments.process_of(tasks[0])
            await asyncio.to_thread(first.size)
            async with kept_registered(store, here):
                await store.tasks.add(tasks)
                loop = SamplingLoop(replace(base, store=store), "bench", environments.sampler)
                await loop.run(asyncio.Event(), asyncio.Event())
        assert loop.state.counts.scored == len(tasks), loop.state.counts
        scores = [record.score async for record in store.records.find(status="scored")]
        return middle_rate([score.scored_at.timestamp() for score in scores if score is not None])


def write_tasks(folder: Path, size: int) -> None:
    """Write tasks in Harbor's format."""
    for number in range(size):
        task = folder / f"{number:05}"
        for place in ("environment", "tests"):
            (task / place).mkdir(parents=True)
        (task / "task.toml").write_text("[agent]\ntimeout_sec = 60\n")
        (task / "instruction.md").write_text(f"Write {number} into /app/number.txt.\n")
        test = f"touch number.txt; grep -cx {number} number.txt > /logs/verifier/reward.txt\n"
        (task / "tests/test.sh").write_text(test)


class EngineTime:
    """The engine's processor time, by the turns that it has served."""

    def __init__(self, core: int, pool: ServerPool) -> None:
        self._process = next(
            child for child in psutil.Process().children() if child.cpu_affinity() == [core]
        )
        self._generate = pool.generate
        self._num_turns = 0
        pool.generate = self._counted  # type: ignore[method-assign]

    async def _counted(self, *args: Any, **more: Any) -> Any:
        self._num_turns += 1
        return await self._generate(*args, **more)

    def read(self) -> tuple[int, float]:
        """Return the turns so far, and the milliseconds."""
        times = self._process.cpu_times()
        return self._num_turns, 1000 * (times.user + times.system)


async def measure(
    engine_core: int, num_rollouts: int, num_rounds: int, model: Path, kinds: Mapping[str, str]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Compare both sides of every kind, one after another."""
    async with AsyncExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(model.with_name("mongo")))
        url = stack.enter_context(engine_on(engine_core, model))
        engine = await stack.enter_async_context(SGLangClient(url))
        here = InferenceService(id="engine", base_url=url, backend="embedded", model_path="m")
        pool = await stack.enter_async_context(ServerPool())
        pool.update([here])
        engine_time = EngineTime(engine_core, pool)
        tasks_folder = model.with_name("tasks")
        write_tasks(tasks_folder, num_rollouts)
        base = RolloutContext(
            store=await stack.enter_async_context(open_store(mongo)),
            servers=pool,
            renderer=Renderer.load(MODEL),
            toolbox=await stack.enter_async_context(connect_tools(ToolsConfig(servers={}))),
            scoring=RegisteredScoring(),
            rollout=RolloutSection(
                max_concurrent_samples_per_process=CONCURRENCY,
                target_concurrency=CONCURRENCY,
                exit_when_done=True,
            ),
            sampling=SamplingSection(max_new_tokens=24, temperature=0.0),
        )
        for kind, text in kinds.items():
            uri = EnvironmentUri.parse(text.format(size=num_rollouts, folder=tasks_folder))
            tasks = list(tasks_of_environment(uri, section(), "train"))
            about = machine()
            await own_loop(uri, base, tasks)  # the first one warms caches up, and does not count
            rounds = []
            turns_before, ms_before = engine_time.read()
            for number in range(num_rounds):
                sides = {"by_env": 0.0, "own_loop": 0.0}
                for side in sorted(sides, reverse=bool(number % 2)):
                    await engine.flush_cache()
                    sides[side] = await (
                        by_env(mongo, here, base, tasks)
                        if side == "by_env"
                        else own_loop(uri, base, tasks)
                    )
                rounds.append({**sides, "ratio": sides["by_env"] / sides["own_loop"]})
            num_turns, ms = engine_time.read()
            yield (
                kind,
                {
                    "ratio": statistics.median(one["ratio"] for one in rounds),
                    "engine_ms_a_turn": (ms - ms_before) / (num_turns - turns_before),
                    "rollouts": num_rollouts,
                    "rounds": rounds,
                    "machine": about,
                },
            )


async def measure_and_keep(out: Path, measured: AsyncIterator[tuple[str, dict[str, Any]]]) -> None:
    """Print each kind's result, and join it to the file at once."""
    async for kind, row in measured:
        print(kind, json.dumps(row), flush=True)
        keep(out, kind, row)


def keep(out: Path, kind: str, row: dict[str, Any]) -> None:
    """Join a kind's result to the file."""
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**kept, kind: row}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/environments.json"))
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    args = parser.parse_args()
    if args.rollouts < 3 * CONCURRENCY:
        parser.error(f"--rollouts has to be {3 * CONCURRENCY} or more, for there to be a middle")
    *cores, engine_core = sorted(os.sched_getaffinity(0))
    if not cores:
        parser.error("two cores are needed: one for the engine, and one for all else")
    os.sched_setaffinity(0, cores)
    os.environ["PYTHONPATH"] = str(PACKAGES)  # the task set of verifiers
    collect_less_garbage()  # as a sampler process does
    with tempfile.TemporaryDirectory() as folder:
        model = deepened(Path(folder) / "model", DEPTH)
        kinds = {kind: KINDS[kind] for kind in args.kinds}
        measured = measure(engine_core, args.rollouts, args.rounds, model, kinds)
        uvloop.run(measure_and_keep(args.out, measured))


if __name__ == "__main__":
    main()

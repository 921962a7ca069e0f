#!/usr/bin/env python
"""Rollouts per second with `--env`, relative to the environment's own loop on the same engine.

    python benchmarks/environments.py --out benchmarks/results/environments.json

For each kind: `by_env`, where a sampler claims, records and scores the rollouts of an environment
in its own process; and `own_loop`, where the same process runs the same tasks, with the same
concurrency, on a plain OpenAI endpoint over the same engine, without database and recording.
Replies are greedy and tool calls are delivered alike, so both sides send the same requests: `turns`
counts the engine's answers. The engine's prefix cache is emptied before each side.

A round has three sides: `by_env`, and `own_loop` before and after it. A round's ratio is that of
`by_env` to the mean of the two, so drift of the machine affects both alike; `own_to_own` is the
ratio of the two, the noise of the measurement. `ratio` is the median of the rounds' ratios.

Only the middle of each side counts: from the time when as many rollouts have ended as run
concurrently, to the end of the last one that starts at full concurrency. Startup and shutdown are
costs per process, not per rollout. The environment of verifiers starts a program for each rollout,
and Harbor's a sandbox: the core that the environment shares with the sampler and the database
limits these two. The engine has its own core, as a production server has its own machine, and
serves the demo's model with added layers that change nothing. A turn therefore costs about 20 ms, a
quarter of a turn of an 8B model (both as in `rollout.py`). The tiny model's replies to these
environments are short, four tokens in a game of TextArena: `engine_ms_a_turn`, the engine's
processor time, shows whether that holds. If it does not, the figures compare only the overhead
around the model. Run it on a quiet machine.

A kind is measured in the environment that `scripts/setup_agents KIND .agentrl/environments/KIND`
creates; Harbor's tasks need no package and are written for the measurement. OpenEnv's actions are
JSON, which the tiny model never writes, so its episodes never end. The file keeps the results of
kinds that a run skips.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from harness.machine import machine
from harness.server_heartbeats import kept_registered
from rollout import engine_on
from rollout_play import MODEL, deepened, open_store

from agentrl.config.sections import AgentSection, DataSection, RolloutSection, SamplingSection
from agentrl.inference import GenerateRequest, ServerPool
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.dialects.api_server import APIServer
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.environments.environment_sampler import EnvironmentProcesses
from agentrl.plugins.environments.environment_source import EnvironmentSource
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.rollout.agent import AgentEndpointServer
from agentrl.rollout.agent.reply_delivery import as_delivered
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
DEPTH = 20


@dataclass(frozen=True)
class Round:
    """Rollouts per second of each side, and the turns that the engine answered."""

    by_env: float
    own_loop: tuple[float, float]
    turns: tuple[int, int, int]

    @property
    def ratio(self) -> float:
        """The rate with `--env` over the environment's own rate."""
        return self.by_env / statistics.fmean(self.own_loop)

    @property
    def own_to_own(self) -> float:
        """The ratio of the two equal sides."""
        return self.own_loop[1] / self.own_loop[0]


def middle_rate(ends: Sequence[float], concurrency: int) -> float:
    """Return the rollouts per second at full concurrency, from the times of their ends."""
    middle = sorted(ends)[concurrency - 1 : len(ends) - concurrency]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def section() -> DataSection:
    """Return the settings of all kinds; verifiers installs its program with the user's uv."""
    return DataSection(
        env_variables=("PYTHONPATH", *(n for n in os.environ if n.startswith("UV_")))
    )


async def own_loop(
    uri: EnvironmentUri, base: RolloutContext, tasks: Sequence[EnvironmentTask]
) -> float:
    """Return the rollouts per second without recording."""
    ends: list[float] = []

    async def answer(messages: list[Any], tools: list[Any]) -> EngineReply:
        ids = base.renderer.render(messages, tools)
        request = GenerateRequest(input_ids=ids, sampling=base.sampling_params("train"))
        result = await base.servers.generate("bench", request, None, group="bench")
        reply = base.renderer.parse(result.output_ids, tools=tools)
        message = as_delivered(reply, may_call=bool(tools))
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = tuple((one["name"], json.dumps(one["arguments"])) for one in functions)
        return EngineReply(message["content"], calls, len(ids), len(result.output_ids))

    concurrency = base.rollout.max_concurrent_samples_per_process
    room = asyncio.Semaphore(concurrency)
    with EnvironmentProcess(uri, section(), quiet=True) as environment:
        environment.size()
        async with APIServer.open("127.0.0.1") as server:

            async def play(task: EnvironmentTask) -> None:
                async with room, server.serve(EngineSession("policy", answer)) as endpoint:
                    await environment.play(task.row, endpoint)
                    ends.append(time.time())

            await asyncio.gather(*map(play, tasks))
    return middle_rate(ends, concurrency)


async def by_env(
    mongo: EmbeddedMongo,
    inference_server: InferenceService,
    base: RolloutContext,
    tasks: Sequence[EnvironmentTask],
) -> float:
    """Return the rollouts per second of a sampler."""
    async with open_store(mongo) as store, AgentEndpointServer.open(AgentSection(), "m") as server:
        with EnvironmentProcesses.open(section(), server) as environments:
            first = environments.process_of(tasks[0])
            await asyncio.to_thread(first.size)
            async with kept_registered(store, inference_server):
                await store.tasks.add(tasks)
                loop = SamplingLoop(replace(base, store=store), "bench", environments.sampler)
                await loop.run(asyncio.Event(), asyncio.Event())
        assert loop.state.counts.scored == len(tasks), loop.state.counts
        scores = [record.score async for record in store.records.find(status="scored")]
        ends = [score.scored_at.timestamp() for score in scores if score is not None]
        return middle_rate(ends, base.rollout.max_concurrent_samples_per_process)


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
    """The engine's processor time per served turn."""

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

    @property
    def num_turns(self) -> int:
        """The turns so far."""
        return self._num_turns

    @property
    def milliseconds(self) -> float:
        """The processor time so far."""
        times = self._process.cpu_times()
        return 1000 * (times.user + times.system)


async def measure(
    engine_core: int, args: argparse.Namespace, model: Path
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Compare both sides of every kind, one after another."""
    async with AsyncExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(model.with_name("mongo")))
        url = stack.enter_context(engine_on(engine_core, model))
        engine = await stack.enter_async_context(SGLangClient(url))
        server = InferenceService(id="engine", base_url=url, backend="embedded", model_path="m")
        pool = await stack.enter_async_context(ServerPool())
        pool.update([server])
        engine_time = EngineTime(engine_core, pool)
        tasks_folder = model.with_name("tasks")
        write_tasks(tasks_folder, args.rollouts)
        base = RolloutContext(
            store=await stack.enter_async_context(open_store(mongo)),
            servers=pool,
            renderer=Renderer.load(MODEL),
            toolbox=await stack.enter_async_context(connect_tools(ToolsConfig(servers={}))),
            scoring=RegisteredScoring(),
            rollout=RolloutSection(
                max_concurrent_samples_per_process=args.concurrency,
                target_concurrency=args.concurrency,
                exit_when_done=True,
            ),
            sampling=SamplingSection(max_new_tokens=24, temperature=0.0),
        )
        for kind in args.kinds:
            text = KINDS[kind].format(size=args.rollouts, folder=tasks_folder)
            uri = EnvironmentUri.parse(text)
            tasks = list(EnvironmentSource(kind).tasks(text, section(), "train", seed=0))
            about = machine()
            await own_loop(uri, base, tasks)  # the first one warms up caches and does not count
            turns_before, ms_before = engine_time.num_turns, engine_time.milliseconds
            rounds: list[Round] = []
            started = time.monotonic()
            while len(rounds) < args.rounds and time.monotonic() < started + args.seconds:
                rates, turns = list[float](), list[int]()
                for is_by_env in (False, True, False):
                    await engine.flush_cache()
                    before = engine_time.num_turns
                    rates.append(
                        await by_env(mongo, server, base, tasks)
                        if is_by_env
                        else await own_loop(uri, base, tasks)
                    )
                    turns.append(engine_time.num_turns - before)
                rounds.append(Round(rates[1], (rates[0], rates[2]), (turns[0], turns[1], turns[2])))
            ms = engine_time.milliseconds - ms_before
            yield (
                kind,
                {
                    "ratio": statistics.median(one.ratio for one in rounds),
                    "own_to_own": statistics.median(one.own_to_own for one in rounds),
                    "engine_ms_a_turn": ms / (engine_time.num_turns - turns_before),
                    "rollouts": args.rollouts,
                    "concurrency": args.concurrency,
                    "rounds": [
                        {**asdict(one), "ratio": one.ratio, "own_to_own": one.own_to_own}
                        for one in rounds
                    ],
                    "machine": about,
                },
            )


async def measure_and_keep(out: Path, measured: AsyncIterator[tuple[str, dict[str, Any]]]) -> None:
    """Print each kind's result, and write it to the file at once."""
    async for kind, row in measured:
        print(kind, json.dumps(row), flush=True)
        keep(out, kind, row)


def keep(out: Path, kind: str, row: dict[str, Any]) -> None:
    """Add a kind's result to the file."""
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**stored, kind: row}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure the requested kinds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/environments.json"))
    parser.add_argument("--rollouts", type=int, default=96, help="of each side")
    parser.add_argument("--concurrency", type=int, default=16, help="rollouts at once")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind, at most")
    parser.add_argument("--seconds", type=float, default=200, help="no round begins after them")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    args = parser.parse_args()
    if args.rollouts < 3 * args.concurrency:
        parser.error(
            f"--rollouts must be {3 * args.concurrency} or more, to leave a middle to measure"
        )
    *cores, engine_core = sorted(os.sched_getaffinity(0))
    if not cores:
        parser.error("two cores are needed: one for the engine and one for everything else")
    os.sched_setaffinity(0, cores)
    os.environ["PYTHONPATH"] = str(PACKAGES)  # the task set of verifiers
    collect_less_garbage()  # as a sampler process does
    with tempfile.TemporaryDirectory() as folder:
        model = deepened(Path(folder) / "model", DEPTH)
        uvloop.run(measure_and_keep(args.out, measure(engine_core, args, model)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Rollouts a second by `--env`, over those of the environment's own loop on the same engine.

    python benchmarks/environments.py --out benchmarks/results/environments.json

For each kind: `by_env`, where a sampler claims, records and scores the rollouts of an environment in
its own process; and `own_loop`, where the same process plays the same tasks, as many at once, at a
plain OpenAI endpoint over the same engine, without database and without recording. Replies are greedy,
so both sides ask the same. Sides change places from round to round; `ratio` is the median of the
rounds' ratios. The engine serves the demo's model below layers that add nothing, so that a turn costs
about a quarter of what a turn of an 8B model does (see `rollout.py`).

A kind is measured where `scripts/setup_agents KIND .agentrl/environments/KIND` has put it.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from harness.machine import machine
from harness.processes import engine_process
from rollout_play import MODEL, deepened, kept_registered, open_store

from agentrl.config.sections import AgentSection, DataSection, RolloutSection, SamplingSection
from agentrl.datasets.task_stream import tasks_of_environment
from agentrl.environments import EnvironmentProcess, EnvironmentUri
from agentrl.inference import GenerateRequest, ServerPool
from agentrl.inference.dialects.api_server import APIServer
from agentrl.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.rollout.agent import AgentEndpointServer, EnvironmentProcesses
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.schema import EnvironmentTask, InferenceService
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools

KINDS = {
    "reasoning_gym": "reasoning_gym:leg_counting?max_animals=4&seed=1",
    "textarena": "textarena:GuessTheNumber-v0?seed=1",
}
CONCURRENCY = 16
DEPTH = 10


async def own_loop(
    uri: EnvironmentUri, base: RolloutContext, tasks: Sequence[EnvironmentTask]
) -> float:
    """Return the rollouts a second without recording."""

    async def reply(messages: list[Any], tools: list[Any]) -> EngineReply:
        ids = base.renderer.render(messages, tools)
        request = GenerateRequest(input_ids=ids, sampling=base.sampling_params("train"))
        result = await base.servers.generate("bench", request, None, group="bench")
        text = base.renderer.parse(result.output_ids).content
        return EngineReply(text, (), len(ids), len(result.output_ids))

    room = asyncio.Semaphore(CONCURRENCY)
    with EnvironmentProcess(uri, DataSection(), quiet=True) as environment:
        environment.size()
        async with APIServer.open("127.0.0.1") as server:

            async def play(task: EnvironmentTask) -> None:
                async with room, server.serve(EngineSession("policy", reply)) as endpoint:
                    await environment.play(task.row, endpoint)

            began = time.perf_counter()
            await asyncio.gather(*map(play, tasks))
            return len(tasks) / (time.perf_counter() - began)


async def by_env(
    mongo: EmbeddedMongo,
    here: InferenceService,
    base: RolloutContext,
    tasks: Sequence[EnvironmentTask],
) -> float:
    """Return the rollouts a second of a sampler."""
    async with open_store(mongo) as store, AgentEndpointServer.open(AgentSection(), "m") as server:
        with EnvironmentProcesses.open(DataSection(), server) as environments:
            first = environments.process_of(tasks[0])
            await asyncio.to_thread(first.size)
            async with kept_registered(store, here):
                await store.tasks.add(tasks)
                loop = SamplingLoop(replace(base, store=store), "bench", environments.sampler)
                began = time.perf_counter()
                await loop.run(asyncio.Event(), asyncio.Event())
                seconds = time.perf_counter() - began
        assert loop.state.counts.scored == len(tasks), loop.state.counts
        return len(tasks) / seconds


async def measure(num_rollouts: int, num_rounds: int, model: Path) -> dict[str, Any]:
    """Compare both sides of every kind."""
    found: dict[str, Any] = {"machine": machine()}
    async with AsyncExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(model.with_name("mongo")))
        url = stack.enter_context(engine_process(model))
        here = InferenceService(id="engine", base_url=url, backend="embedded", model_path="m")
        pool = await stack.enter_async_context(ServerPool())
        pool.update([here])
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
        for kind, text in KINDS.items():
            uri = EnvironmentUri.parse(f"{text}&size={num_rollouts}")
            tasks = list(tasks_of_environment(uri, DataSection(), "train"))
            await own_loop(uri, base, tasks)  # the first one warms caches up, and does not count
            rounds = []
            for number in range(num_rounds):
                sides = {"by_env": 0.0, "own_loop": 0.0}
                for side in sorted(sides, reverse=bool(number % 2)):
                    sides[side] = await (
                        by_env(mongo, here, base, tasks)
                        if side == "by_env"
                        else own_loop(uri, base, tasks)
                    )
                rounds.append({**sides, "ratio": sides["by_env"] / sides["own_loop"]})
            ratio = statistics.median(one["ratio"] for one in rounds)
            found[kind] = {"ratio": ratio, "rollouts": num_rollouts, "rounds": rounds}
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rollouts", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = deepened(Path(folder) / "model", DEPTH)
        measured = uvloop.run(measure(args.rollouts, args.rounds, model))
    text = json.dumps(measured, indent=2) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

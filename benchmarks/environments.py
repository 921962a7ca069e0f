"""Rollouts per second with `--env`, relative to the environment's own loop on the same engine.

    python benchmarks/environments.py

For each kind: `by_env`, where a sampler claims, records and scores the rollouts of an environment
in its own process; and `own_loop`, where the same process runs the same tasks, with the same
concurrency, on a plain OpenAI endpoint over the same engine, without database and recording.
Replies are greedy and tool calls are delivered alike, so both sides send the same requests. The
engine's prefix cache is emptied before each side.

A round has three sides: `by_env`, and `own_loop` before and after it. A round's ratio is that of
`by_env` to the mean of the two, so drift of the machine affects both alike; `own_to_own` is the
ratio of the two, the noise of the measurement. `ratio` is the median of the rounds' ratios.

Only the middle of each side counts: from the time when as many rollouts have ended as run
concurrently, to the end of the last one that starts at full concurrency. Startup and shutdown are
costs per process, not per rollout. The environment of verifiers starts a program for each rollout,
and Harbor's a sandbox: the core that the environment shares with the sampler and the database
limits these two. The engine has its own core, as a production server has its own machine, and
serves the demo's model with added layers that change nothing. A turn therefore costs about 20 ms, a
quarter of a turn of an 8B model. The tiny model's replies to these
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
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
import uvloop
from harness.played import MODEL, open_store, play, rollout_context, served_by
from harness.processes import engine_process
from harness.results import keep, machine, parser
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections import AgentSection, DataSection, RolloutSection, SamplingSection
from agentrl.inference import GenerateRequest, ServerPool
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.dialects.api_server import APIServer
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.environments.environment_sampler import EnvironmentProcesses
from agentrl.plugins.environments.environment_source import EnvironmentSource
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply, EngineSession
from agentrl.rollout import RolloutContext
from agentrl.rollout.agent import AgentEndpointServer
from agentrl.rollout.agent.reply_delivery import as_delivered
from agentrl.rollout.worker.sampler_process import collect_less_garbage
from agentrl.schema import EnvironmentTask
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
CACHES = ("--kv-cache-bytes", str(6 << 30), "--prefix-cache-bytes", str(6 << 30))
"""They hold all concurrent rollouts, even while tools run; otherwise, prefills would be measured."""


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
    mongo: EmbeddedMongo, url: str, base: RolloutContext, tasks: Sequence[EnvironmentTask]
) -> float:
    """Return the rollouts per second of a sampler."""
    async with open_store(mongo) as store, AgentEndpointServer.open(AgentSection(), "m") as server:
        with EnvironmentProcesses.open(section(), server) as environments:
            await asyncio.to_thread(environments.process_of(tasks[0]).size)
            async with served_by(store, url):
                await store.tasks.add(tasks)
                loop = await play(replace(base, store=store), environments.sampler)
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
    """The engine's processor time and number of served turns."""

    def __init__(self, core: int, pool: ServerPool) -> None:
        self._process = next(
            child for child in psutil.Process().children() if child.cpu_affinity() == [core]
        )
        self._generate = pool.generate
        self.num_turns = 0
        pool.generate = self._counted  # type: ignore[method-assign]

    async def _counted(self, *args: Any, **more: Any) -> Any:
        self.num_turns += 1
        return await self._generate(*args, **more)

    @property
    def milliseconds(self) -> float:
        """The processor time so far."""
        return 1000 * sum(self._process.cpu_times()[:2])


async def measure(
    engine_core: int, args: argparse.Namespace, model: Path
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Compare both sides of every kind, one after another."""
    async with AsyncExitStack() as stack:
        mongo = stack.enter_context(EmbeddedMongo(model.with_name("mongo")))
        url = stack.enter_context(engine_on(engine_core, model))
        engine = await stack.enter_async_context(SGLangClient(url))
        store = await stack.enter_async_context(open_store(mongo))
        pool = await stack.enter_async_context(served_by(store, url))
        toolbox = await stack.enter_async_context(connect_tools(ToolsConfig(servers={})))
        engine_time = EngineTime(engine_core, pool)
        write_tasks(model.with_name("tasks"), args.rollouts)
        rollout = RolloutSection(
            max_concurrent_samples_per_process=args.concurrency,
            target_concurrency=args.concurrency,
            exit_when_done=True,
        )
        sampling = SamplingSection(max_new_tokens=24, temperature=0.0)
        base = rollout_context(store, pool, toolbox, sampling, rollout)
        for kind in args.kinds:
            text = KINDS[kind].format(size=args.rollouts, folder=model.with_name("tasks"))
            uri = EnvironmentUri.parse(text)
            tasks = list(EnvironmentSource(kind).tasks(text, section(), "train", seed=0))
            about = machine()
            await own_loop(uri, base, tasks)  # the first one warms up caches and does not count
            turns_before, ms_before = engine_time.num_turns, engine_time.milliseconds
            rounds: list[dict[str, float]] = []
            started = time.monotonic()
            while len(rounds) < args.rounds and time.monotonic() < started + args.seconds:
                rates = []
                for is_by_env in (False, True, False):
                    await engine.flush_cache()
                    rates.append(
                        await by_env(mongo, url, base, tasks)
                        if is_by_env
                        else await own_loop(uri, base, tasks)
                    )
                own, env, again = rates
                rounds.append({"ratio": env / fmean((own, again)), "own_to_own": again / own})
            num_turns = engine_time.num_turns - turns_before
            yield (
                kind,
                {
                    **{name: median(one[name] for one in rounds) for name in rounds[0]},
                    "engine_ms_a_turn": (engine_time.milliseconds - ms_before) / num_turns,
                    "rollouts": args.rollouts,
                    "concurrency": args.concurrency,
                    "rounds": rounds,
                    "machine": about,
                },
            )


async def measure_and_keep(out: Path, measured: AsyncIterator[tuple[str, dict[str, Any]]]) -> None:
    """Keep each kind's result at once."""
    async for kind, row in measured:
        keep(out, {kind: row})


def main() -> None:
    """Measure the requested kinds."""
    flags = parser(__doc__, "environments")
    flags.add_argument("--rollouts", type=int, default=96, help="of each side")
    flags.add_argument("--concurrency", type=int, default=16, help="rollouts at once")
    flags.add_argument("--rounds", type=int, default=7, help="of each kind, at most")
    flags.add_argument("--seconds", type=float, default=200, help="no round begins after them")
    flags.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    args = flags.parse_args()
    if args.rollouts < 3 * args.concurrency:
        flags.error("--rollouts must be three times --concurrency, to leave a middle to measure")
    core = leave_a_core(flags)
    os.environ["PYTHONPATH"] = str(PACKAGES)  # the task set of verifiers
    with tempfile.TemporaryDirectory() as folder:
        model = deepened(Path(folder) / "model", DEPTH)
        uvloop.run(measure_and_keep(args.out, measure(core, args, model)))


if __name__ == "__main__":
    main()

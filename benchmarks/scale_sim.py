"""Simulates training beyond this machine: 10,000 rollouts on 256 servers, in virtual time.

    python benchmarks/scale_sim.py

The real code runs the samplers' loop with its claims and refreshes; the server pool with its
choice, retries and fencing; the trainer's reading and admission of groups with its freshness bound;
and the publisher with its pauses. Simulated are the rates of `virtual_world.Rates`, a trace of
rollouts with heavy-tailed lengths and tool times, an optimizer step of fixed length, and servers
that die, hang and come back. The store is in memory. The simulation measures how busy the trainer
is compared with the ideal pipeline (steps back to back), how old the trained tokens are, and the
same trace with sampling and training in turn: either every step from scratch, or with rollouts that
continue after the trainer's turn on the servers' devices.
"""

import argparse
import asyncio
import logging
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
from harness.results import parser, report
from virtual_world import (
    Rates,
    SimClient,
    SimServer,
    SimStore,
    fail_now_and_then,
    report_load,
    run_virtually,
)

from agentrl.config.sections import (
    AlgorithmSection,
    InferenceSection,
    PublishSection,
    RolloutSection,
    SamplingSection,
    TrainerSection,
)
from agentrl.inference import GenerateRequest, ServerPool
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.rewards import RegisteredScoring
from agentrl.rollout.async_sampler import AsyncSampler, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker.sampling_loop import SamplingLoop
from agentrl.schema import Control, InferenceService, MCPTask, SamplingParams, Score
from agentrl.trainer.rl.step_groups import GroupReader, RecordImages

_PROMPT = np.zeros(1, np.int32)
_WARM_STEPS = 1
"""The first step waits for the first rollouts in any pipeline."""


@dataclass(frozen=True)
class Setting:
    """One simulated run."""

    num_servers: int
    num_samplers: int
    groups_per_step: int
    num_generations: int
    max_staleness: int
    step_seconds: float
    num_steps: int
    seed: int = 0
    colocated: bool = False
    """Trainer and servers take turns on the same devices."""
    is_whole: bool = False
    """The run ends with these steps. Otherwise, they are the first of a longer run: at its end, a
    run only waits for its last groups.
    """
    places: int | None = None
    """Generations that a server runs at once; further ones wait, and samplers follow its load."""
    is_ordered: bool = True
    """Samplers know these places, and servers the order of the rollouts."""


def rollout_of(record_id: str) -> list[tuple[int, float]]:
    """Return the turns of a heavy-tailed rollout: sampled tokens, and seconds of the tools."""
    rng = random.Random(record_id)
    return [
        (
            min(4096, max(16, int(rng.lognormvariate(5.6, 1.0)))),
            min(60.0, rng.lognormvariate(1.0, 1.0)),
        )
        for _ in range(1 + min(24, int(rng.expovariate(1 / 4))))
    ]


class SimSampler(AsyncSampler[MCPTask]):
    """A rollout of the trace: the same turns, lengths and tool times in every execution."""

    async def run(self) -> RolloutResult:  # noqa: D102 - described where it is declared
        oldest, newest = math.inf, 0
        claimed_at = time.monotonic()
        for length, tool_seconds in rollout_of(self.record.id):
            result = await self.context.servers.generate(
                self.record.id,
                GenerateRequest(
                    input_ids=_PROMPT,
                    sampling=SamplingParams(max_new_tokens=length),
                    priority=self._priority,
                ),
            )
            oldest = min(oldest, result.version_spans[0].version)
            newest = max(newest, result.version_spans[-1].version)
            await asyncio.sleep(tool_seconds)
        store = cast(SimStore, self.context.store)
        store.sampled(self.record.id, int(oldest), newest)
        store.rollout_seconds.append(time.monotonic() - claimed_at)
        return RolloutResult("answered", "")

    async def evaluate_record(self, result: RolloutResult) -> Score:  # noqa: D102
        return Score(scorer="sim", value=float(random.Random(f"{self.record.id}!").random() < 0.5))


@dataclass
class Outcome:
    """Results of a simulated run, in virtual seconds."""

    seconds: float
    trained_records: int
    step_seconds: float
    publish_seconds: float
    """Handing over weights and, if shared, devices."""
    staleness: Counter[int]
    dropped: Counter[str]
    num_failed_updates: int
    most_running: int
    first_step_seconds: float = 0.0
    """Until the first step had its groups."""
    first_group_seconds: float = 0.0
    rollout_seconds: Sequence[float] = ()
    """From the claim of each rollout to its end."""

    @property
    def idle_share(self) -> float:
        """Share of the time in which the trainer did not compute; publishing counts as idle."""
        return 1 - self.step_seconds / self.seconds


async def simulate(setting: Setting, rates: Rates, folder: Path) -> Outcome:
    """Simulate a setting until its end."""
    store = SimStore(
        setting.num_generations,
        setting.groups_per_step * 10 * setting.num_steps,
        setting.num_samplers,
    )
    urls = [f"http://server{number}" for number in range(setting.num_servers)]
    SimClient.servers = {url: SimServer(url, rates, setting.places) for url in urls}
    for url in urls:
        store.known[url] = InferenceService(
            id=url,
            base_url=url,
            backend="sglang",
            model_path="m",
            takes_priorities=setting.is_ordered,
        )
    of_servers = [
        report_load(store, server, says_places=setting.is_ordered)
        if setting.places
        else fail_now_and_then(store, server, rates, setting.seed + number)
        for number, server in enumerate(SimClient.servers.values())
    ]
    failing = [asyncio.create_task(chore) for chore in of_servers]
    rollouts = setting.groups_per_step * setting.num_generations * (setting.max_staleness + 1)
    share = None if setting.places else math.ceil(rollouts / setting.num_samplers)
    stop = asyncio.Event()
    pools = [ServerPool() for _ in range(setting.num_samplers)]
    samplers = [
        asyncio.create_task(
            SamplingLoop(
                context_of(store, pool, share),
                f"sampler:{number}:x",
                cast(Any, SimSampler),
            ).run(stop, asyncio.Event())
        )
        for number, pool in enumerate(pools)
    ]
    training = asyncio.create_task(train(setting, rates, store, folder))
    tasks: set[asyncio.Task[Any]] = {training, *samplers, *failing}
    try:
        # The others run until they are cancelled; one that ends has failed.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {training}:
            task.result()
        return training.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def context_of(store: SimStore, pool: ServerPool, capacity: int | None) -> RolloutContext:
    """Return the context that the rollouts of one sampler process share, without tools and texts.

    With a capacity of None, the number of rollouts follows the servers' load.
    """
    absent = cast(Any, None)
    return RolloutContext(
        store=cast(Any, store),
        servers=pool,
        renderer=absent,
        toolbox=absent,
        scoring=RegisteredScoring(),
        rollout=RolloutSection(
            max_concurrent_samples_per_process=capacity or 256, target_concurrency=capacity
        ),
        sampling=SamplingSection(),
    )


async def train(setting: Setting, rates: Rates, store: SimStore, folder: Path) -> Outcome:
    """Run the trainer's loop with a pause instead of the optimizer's work."""
    clock = asyncio.get_running_loop().time
    reader = GroupReader(
        cast(Any, store),
        RecordImages(cast(Any, store), None),
        algorithm=AlgorithmSection(max_staleness=setting.max_staleness),
        trainer=TrainerSection(
            max_steps=setting.num_steps + (0 if setting.is_whole else setting.max_staleness + 1)
        ),
        seed=setting.seed,
        more_may_come=True,
        control=Control(
            groups_per_step=setting.groups_per_step, max_staleness=setting.max_staleness
        ),
    )
    publisher = PolicyPublisher(
        cast(Any, store), folder, publish=PublishSection(), inference=InferenceSection()
    )
    await publish(publisher, 0)
    consumed = 0
    await reader.admit(consumed, 1)
    total = Outcome(0, 0, 0, 0, Counter(), Counter(), 0, 0)
    for step in range(1, setting.num_steps + 1):
        is_counted = step > _WARM_STEPS
        started = clock()
        found = await reader.read_step(step, groups_consumed=consumed, stop=asyncio.Event())
        read = clock()
        total.first_step_seconds = total.first_step_seconds or read
        running = sum(server.num_running for server in SimClient.servers.values())
        total.most_running = max(total.most_running, running)
        consumed += len(found.groups)
        for group in found.groups:
            trained = {turn.record_id for turn in group.turns}
            if is_counted:
                total.trained_records += len(trained)
            for turn in group.turns:
                total.staleness[step - 1 - int(turn.versions.min())] += 1
        total.dropped.update(found.dropped)
        if setting.colocated:
            await publisher.put_to_sleep()
            await asyncio.sleep(rates.move_seconds)
        taken = clock()
        await asyncio.sleep(setting.step_seconds)
        trained_at = clock()
        if setting.colocated:
            await asyncio.sleep(rates.move_seconds)
        total.num_failed_updates += await publish(publisher, step)
        await reader.admit(consumed, step + 1)
        if is_counted:
            total.step_seconds += trained_at - taken
            total.publish_seconds += taken - read + clock() - trained_at
            total.seconds += clock() - started
    total.first_group_seconds, total.rollout_seconds = store.first_group_at, store.rollout_seconds
    return total


async def publish(publisher: PolicyPublisher, version: int) -> int:
    """Announce a version without weights; return how many servers failed."""
    directory = publisher.directory(version)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").touch()
    report = await publisher.announce(version)
    await publisher.settle()
    return len(report.failed)


def describe(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a run."""
    return {
        "seconds": round(outcome.seconds, 1),
        "idle_share": outcome.idle_share,
        "publish_share": outcome.publish_seconds / outcome.seconds,
        "records_per_second": outcome.trained_records / outcome.seconds,
        "most_generations_at_a_step": outcome.most_running,
        "staleness": {str(age): count for age, count in sorted(outcome.staleness.items())},
        "dropped": dict(outcome.dropped),
        "failed_updates": outcome.num_failed_updates,
    }


def simulated(setting: Setting, rates: Rates, folder: Path) -> Outcome:
    """Simulate a setting in virtual time."""
    random.seed(0)

    async def run() -> Outcome:
        return await simulate(setting, rates, folder)

    with (
        mock.patch("agentrl.inference.client.pool.SGLangClient", SimClient),
        mock.patch("agentrl.inference.weight_sync.publisher.SGLangClient", SimClient),
    ):
        outcome: Outcome = run_virtually(run)
    return outcome


def described_order(outcome: Outcome) -> dict[str, Any]:
    """Return the figures that depend on which rollouts are held and which requests go first."""
    ages = outcome.staleness
    seconds = outcome.rollout_seconds
    return {
        "claim_to_end_median": float(np.median(seconds)),
        "claim_to_end_p95": float(np.quantile(seconds, 0.95)),
        "to_first_group": outcome.first_group_seconds,
        "to_first_step": outcome.first_step_seconds,
        "mean_staleness": sum(age * count for age, count in ages.items()) / ages.total(),
        "records_per_second": outcome.trained_records / outcome.seconds,
        "dropped": dict(outcome.dropped),
    }


def measure_order() -> dict[str, Any]:
    """Simulate servers that run 32 generations at once, with and without the order."""
    found: dict[str, Any] = {}
    for name, is_ordered in (("unordered", False), ("ordered", True)):
        setting = Setting(
            num_servers=2,
            num_samplers=2,
            groups_per_step=32,
            num_generations=8,
            max_staleness=2,
            step_seconds=20.0,
            num_steps=8,
            places=32,
            is_ordered=is_ordered,
        )
        with tempfile.TemporaryDirectory() as folder:
            found[name] = described_order(simulated(setting, Rates(), Path(folder)))
    before, after = found["unordered"], found["ordered"]
    return found | {"claim_to_end": after["claim_to_end_median"] / before["claim_to_end_median"]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate one size asynchronously, synchronously and on shared devices."""
    rates = Rates()
    common = {
        "num_servers": args.servers,
        "num_samplers": args.samplers,
        "groups_per_step": args.groups,
        "num_generations": 8,
        "step_seconds": args.step_seconds,
    }
    bound, steps = {"max_staleness": args.staleness}, {"num_steps": args.steps}
    settings = {
        "asynchronous": Setting(**common, **bound, **steps),
        "synchronous": Setting(**common, max_staleness=0, num_steps=max(3, args.steps // 3)),
        "colocated": Setting(**common, **bound, **steps, colocated=True),
    }
    result: dict[str, Any] = {}
    for name, setting in settings.items():
        with tempfile.TemporaryDirectory() as folder:
            result[name] = describe(simulated(setting, rates, Path(folder)))
    rate = {name: one["records_per_second"] for name, one in result.items()}
    return {
        **result,
        "idle_share": result["asynchronous"]["idle_share"],
        "async_over_sync": rate["asynchronous"] / rate["synchronous"],
        "colocated_over_sync": rate["colocated"] / rate["synchronous"],
        "order": measure_order(),
        "rollouts_admitted": args.groups * 8 * (args.staleness + 1),
        "settings": {"rates": vars(rates), **bound, **common},
    }


if __name__ == "__main__":
    flags = parser(__doc__, "scale_sim")
    flags.add_argument("--servers", type=int, default=256)
    flags.add_argument("--samplers", type=int, default=8)
    flags.add_argument("--groups", type=int, default=320, help="per step, of 8 rollouts each")
    flags.add_argument("--staleness", type=int, default=3)
    flags.add_argument("--step-seconds", type=float, default=90.0)
    flags.add_argument("--steps", type=int, default=8)
    logging.basicConfig(level=logging.ERROR)
    report(flags, measure)

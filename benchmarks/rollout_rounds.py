"""The sides of the rollout benchmark's comparison, and their timing.

Every round has four sides: the sampler, the same requests sent directly, the same once more, and
the same next to a busy neighbor. The order is reversed from one round to the next, so drift (a
clock, a cache, another process) affects all sides alike. The difference between the two direct
sides is the noise of the measurement.

A side runs chains of requests, `CONCURRENCY` at a time. Only its middle counts: from the moment
when as many chains have ended as run concurrently, to the moment when the last chain starts. The
burst of claims and prefills at the start, and the decreasing concurrency at the end, are excluded
on both sides.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import numpy as np

from agentrl.inference import GenerateRequest, GenerateResult, ServerPool
from agentrl.inference.client.sglang_client import OnPartial
from agentrl.inference.wire import request_body

CONCURRENCY = 64


@dataclass(frozen=True)
class Call:
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
    in_flight: float
    """Average number of requests in the engine."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
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
        inside = [call for call in calls if begin < call.ended <= end]
        overlaps = (max(0.0, min(c.ended, end) - max(c.began, begin)) for c in calls)
        return cls(
            seconds=end - begin,
            tokens_per_second=sum(call.num_tokens for call in inside) / (end - begin),
            turns_per_second=len(inside) / (end - begin),
            in_flight=sum(overlaps) / (end - begin),
        )


@dataclass(frozen=True)
class Round:
    """One measurement of all sides, with the processor time of all processes except the engine."""

    sampled: Middle
    straight: Middle
    again: Middle
    beside: Middle
    """Direct requests, with the other cores as busy as on the sampler's side."""
    cpu_ms_a_turn: Mapping[str, float]
    """By process, on the sampler's side."""
    num_same: int
    """Requests of the sampler's side that equal those of the direct sides, to the last token."""
    num_turns: int

    def __str__(self) -> str:
        """Return the round in one line."""
        cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in self.cpu_ms_a_turn.items())
        return (
            f"{self.sampled.tokens_per_second:.0f} tokens/s with {self.sampled.in_flight:.1f} in "
            f"flight, direct {self.straight.tokens_per_second:.0f} and "
            f"{self.again.tokens_per_second:.0f}, beside work "
            f"{self.beside.tokens_per_second:.0f}; {self.ratio:.3f} (equals: "
            f"{self.straight_ratio:.3f}, beside equal work: {self.ratio_beside_work:.3f}); CPU ms "
            f"a turn: {cpu}"
        )

    @property
    def ratio(self) -> float:
        """The sampler's tokens per second over those of the direct sides."""
        return self.sampled.tokens_per_second / self._straight_tokens_per_second

    @property
    def ratio_beside_work(self) -> float:
        """The sampler's tokens per second over those of the direct side with busy neighbors."""
        return self.sampled.tokens_per_second / self.beside.tokens_per_second

    @property
    def neighbour_ratio(self) -> float:
        """The engine's tokens per second with a busy neighbor over those without."""
        return self.beside.tokens_per_second / self._straight_tokens_per_second

    @property
    def straight_ratio(self) -> float:
        """The ratio of the two equal sides."""
        return self.again.tokens_per_second / self.straight.tokens_per_second

    @property
    def _straight_tokens_per_second(self) -> float:
        return (self.straight.tokens_per_second + self.again.tokens_per_second) / 2


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the medians over rounds, and the spread of the rounds."""
    ratios = [one_round.ratio for one_round in rounds]
    straight_ratios = [one_round.straight_ratio for one_round in rounds]
    straight = [side for one_round in rounds for side in (one_round.straight, one_round.again)]
    sampled = [one_round.sampled for one_round in rounds]
    engine_ms = 1000 / _median(straight, "turns_per_second")
    cpu_ms = {
        name: statistics.median(one_round.cpu_ms_a_turn[name] for one_round in rounds)
        for name in rounds[0].cpu_ms_a_turn
    }
    return {
        "throughput_ratio": statistics.median(ratios),
        "ratios": ratios,
        "straight_to_straight": {
            "median": statistics.median(straight_ratios),
            "standard_deviation": statistics.stdev(straight_ratios) if len(rounds) > 1 else None,
            "ratios": straight_ratios,
        },
        "beside_equal_work": {
            "throughput_ratio": statistics.median(
                one_round.ratio_beside_work for one_round in rounds
            ),
            "ratios": [one_round.ratio_beside_work for one_round in rounds],
            "left_by_work_alone": statistics.median(
                one_round.neighbour_ratio for one_round in rounds
            ),
        },
        "engine_ms_a_turn": engine_ms,
        "cpu_ms_a_turn": cpu_ms,
        "highest_ratio_of_one_core": min(1.0, engine_ms / sum(cpu_ms.values())),
        "sampler_tokens_per_second": _median(sampled, "tokens_per_second"),
        "direct_tokens_per_second": _median(straight, "tokens_per_second"),
        "sampler_requests_in_flight": _median(sampled, "in_flight"),
        "direct_requests_in_flight": _median(straight, "in_flight"),
        "same_requests": sum(e.num_same for e in rounds) / sum(e.num_turns for e in rounds),
        "seconds_measured_a_side": _median(sampled, "seconds"),
    }


def _median(sides: Sequence[Middle], name: str) -> float:
    return float(statistics.median(getattr(side, name) for side in sides))


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


Chains = Mapping[str, Sequence[GenerateRequest]]
"""Every rollout's requests, in order."""


def num_same(chains: Chains, others: Chains) -> int:
    """Count the requests of `chains` that equal those at the same places in `others`."""
    return sum(
        np.array_equal(request.input_ids, other.input_ids) and request.sampling == other.sampling
        for name, requests in chains.items()
        for request, other in zip(requests, others.get(name, ()), strict=False)
    )


async def replay(url: str, chains: Chains) -> list[Call]:
    """Send requests directly to the engine, those of a chain in sequence."""
    waiting = iter(chains.items())
    calls: list[Call] = []

    async def worker(client: aiohttp.ClientSession) -> None:
        for chain, requests in waiting:
            for request in requests:
                started = time.perf_counter()
                async with client.post(f"{url}/generate", json=request_body(request)) as answer:
                    answer.raise_for_status()
                    num_tokens = len((await answer.json())["output_ids"])
                calls.append(Call(chain, started, time.perf_counter(), num_tokens))

    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as client:
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
    return calls

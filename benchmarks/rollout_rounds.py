"""Both sides of the rollout benchmark's comparison, and the clock that is held to them.

A side plays chains of requests, `CONCURRENCY` at once. What counts of it is its middle: from the
moment when as many chains have ended as are played at once to the moment when the last chain
begins. The claims and prefills that all come together at the start, and the chains that run out at
the end, are left out alike on both sides.
"""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp

from agentrl.inference import GenerateRequest, GenerateResult, ServerPool
from agentrl.inference.client import OnPartial

CONCURRENCY = 64


@dataclass(frozen=True)
class Call:
    """One request, in seconds of `time.perf_counter`."""

    chain: str
    began: float
    ended: float
    num_tokens: int
    """Tokens that were sampled."""


@dataclass(frozen=True)
class Middle:
    """A side while all of its chains were being played."""

    seconds: float
    tokens_per_second: float
    turns_per_second: float
    in_flight: float
    """Requests that the engine had, on average."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """Return the middle of these calls.

        Raises:
            ValueError: there were too few chains.
        """
        begins: dict[str, float] = {}
        ends: dict[str, float] = {}
        for call in calls:
            begins[call.chain] = min(call.began, begins.get(call.chain, call.began))
            ends[call.chain] = max(call.ended, ends.get(call.chain, call.ended))
        if len(ends) <= 2 * CONCURRENCY:
            raise ValueError(f"{len(ends)} rollouts are too few for a middle")
        begin, end = sorted(ends.values())[CONCURRENCY - 1], max(begins.values())
        inside = [call for call in calls if begin < call.ended <= end]
        overlaps = (max(0.0, min(c.ended, end) - max(c.began, begin)) for c in calls)
        return cls(
            seconds=end - begin,
            tokens_per_second=sum(call.num_tokens for call in inside) / (end - begin),
            turns_per_second=len(inside) / (end - begin),
            in_flight=sum(overlaps) / (end - begin),
        )


def median(sides: Sequence[Middle], what: str) -> float:
    """Return the median of one figure over rounds."""
    return statistics.median(getattr(side, what) for side in sides)


class RecordingPool(ServerPool):
    """Keeps what every rollout asked, and when."""

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
        """Sample, and keep what was asked."""
        self.asked[key].append(request)
        began = time.perf_counter()
        result = await super().generate(key, request, on_partial, group=group)
        self.calls.append(Call(key, began, time.perf_counter(), len(result.output_ids)))
        return result


async def replay(url: str, chains: dict[str, list[GenerateRequest]]) -> list[Call]:
    """Send the same requests straight to the engine, each chain's one after the other."""
    waiting = iter(chains.items())
    calls: list[Call] = []

    async def worker(client: aiohttp.ClientSession) -> None:
        for chain, requests in waiting:
            for request in requests:
                sampling = request.sampling.model_dump(exclude={"seed"})
                sampling["sampling_seed"] = request.sampling.seed
                sampling["stop_token_ids"] = list(request.sampling.stop_token_ids)
                body = {
                    "input_ids": request.input_ids.tolist(),
                    "sampling_params": sampling,
                    "return_logprob": True,
                }
                began = time.perf_counter()
                async with client.post(f"{url}/generate", json=body) as answer:
                    answer.raise_for_status()
                    num_tokens = len((await answer.json())["output_ids"])
                calls.append(Call(chain, began, time.perf_counter(), num_tokens))

    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as client:
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
    return calls

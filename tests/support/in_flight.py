"""Generations that are in flight while something is done to their server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from support.engines import prompt

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateResult, parse_result

LONG = 250


async def long_generation(http: httpx.AsyncClient, seed: int, rid: str) -> GenerateResult:
    body = {
        "rid": rid,
        "input_ids": prompt(seed).tolist(),
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True},
    }
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return parse_result(answer.json(), "server")


@asynccontextmanager
async def in_flight(
    client: SGLangClient, http: httpx.AsyncClient, count: int = 4
) -> AsyncIterator[list[asyncio.Task[GenerateResult]]]:
    """Long generations that have sampled some tokens and are far from their end."""
    tasks = [
        asyncio.create_task(long_generation(http, seed, f"{seed:032x}")) for seed in range(count)
    ]
    try:
        while (await client.loads()).num_used_tokens < count * 50:
            await asyncio.sleep(0.01)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def split_at_update(result: GenerateResult) -> int:
    """Return the index of the first token under the second weights."""
    first, second = result.version_spans
    assert (first.version, second.version) == (1, 2)
    assert (first.start, first.end, second.end) == (0, second.start, len(result.output_ids))
    return second.start

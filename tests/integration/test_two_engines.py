"""Two real engines behind the pool: who gets how much work, and what is found in their caches."""

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import numpy as np
import psutil
import pytest
from harness.processes import engine_process
from support.engines import make_model, prompt, request

from agentrl.inference import GenerateResult, ServerPool, SGLangClient
from agentrl.runtime.ports import free_port, listens
from agentrl.schema import InferenceService

SLOWED_SHARE = 0.75
"""Of the time in which the slow engine is stopped."""
PERIOD_SECONDS = 0.04
QUESTION_TOKENS = 400


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    model = make_model(tmp_path_factory.mktemp("model"), seed=1)
    version = ("--weight-version", "7")
    with engine_process(model, *version) as first, engine_process(model, *version) as second:
        yield first, second


@contextmanager
def gateway(*urls: str) -> Iterator[str]:
    """Run SGLang's own router before the servers; yields its address once it knows them."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics_port)]
    with subprocess.Popen(
        [*command, "--policy", "round_robin", "--worker-urls", *urls],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as router:
        address = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(trust_env=False, timeout=5) as client:
                while not is_ready(client, address, len(urls)):
                    assert router.poll() is None
                    time.sleep(0.1)
            yield address
        finally:
            router.terminate()


def is_ready(client: httpx.Client, address: str, num_servers: int) -> bool:
    try:
        answer = client.get(f"{address}/readiness")
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["healthy_workers"] == num_servers


@asynccontextmanager
async def pool_of(*urls: str, gateway: str | None = None) -> AsyncIterator[ServerPool]:
    async with ServerPool(gateway=gateway) as pool:
        pool.update(
            [
                InferenceService(id=url, base_url=url, backend="embedded", model_path="m")
                for url in urls
            ]
        )
        yield pool


def engine_on(url: str) -> psutil.Process:
    port = int(url.rpartition(":")[2])
    for child in psutil.Process().children():
        if listens(child.pid, port):
            return child
    raise AssertionError(f"no engine on {port}")


@asynccontextmanager
async def slowed(url: str) -> AsyncIterator[None]:
    """Stop an engine for most of the time, as a neighbour on its machine would."""
    process = engine_on(url)

    async def brake() -> None:
        while True:
            process.suspend()
            await asyncio.sleep(PERIOD_SECONDS * SLOWED_SHARE)
            process.resume()
            await asyncio.sleep(PERIOD_SECONDS * (1 - SLOWED_SHARE))

    braking = asyncio.create_task(brake())
    try:
        yield
    finally:
        braking.cancel()
        await asyncio.wait([braking])
        process.resume()


async def played(pool: ServerPool, seconds: float, num_rollouts: int) -> Counter[str]:
    """Keep so many rollouts of four turns going; returns the generations of each server."""
    done: Counter[str] = Counter()
    ends_at = time.monotonic() + seconds

    async def play(number: int) -> None:
        turn = 0
        while time.monotonic() < ends_at:
            asked = request(1000 * number + turn // 4, 30 + 30 * (turn % 4), max_new_tokens=8)
            result = await pool.generate(f"{number}/{turn // 4}", asked)
            done[result.server] += 1
            turn += 1

    await asyncio.gather(*(play(number) for number in range(num_rollouts)))
    return done


@pytest.mark.slow  # it needs cores of its own: both speeds are measured
async def test_engines_get_work_in_proportion_to_their_speed(urls: tuple[str, str]) -> None:
    fast, slow = urls
    alone: Counter[str] = Counter()
    together: Counter[str] = Counter()
    async with (
        pool_of(*urls) as pool,
        pool_of(fast) as only_fast,
        pool_of(slow) as only_slow,
        slowed(slow),
    ):
        # In turns: what else the machine does in these seconds slows both ways alike.
        for _ in range(6):
            # Both at work at once: they share the machine in the same way as afterwards.
            parts = await asyncio.gather(played(only_fast, 1, 8), played(only_slow, 1, 8))
            alone.update(parts[0] + parts[1])
            together.update(await played(pool, 1, 16))
    speeds = alone[fast] / alone[slow]
    assert speeds > 1.5
    assert 0.6 < together[fast] / together[slow] / speeds < 1.6
    assert sum(together.values()) > 0.75 * sum(alone.values())


@pytest.mark.slow
async def test_later_turns_find_their_history_in_the_cache_of_the_server_that_has_it(
    urls: tuple[str, str],
) -> None:
    later: list[GenerateResult] = []
    slots = asyncio.Semaphore(12)

    async def play(pool: ServerPool, number: int) -> None:
        async with slots:
            ids = prompt(number, QUESTION_TOKENS)
            for turn in range(3):
                asked = request(0, max_new_tokens=4).model_copy(update={"input_ids": ids})
                result = await pool.generate(str(number), asked)
                if turn:
                    later.append(result)
                ids = np.concatenate([ids, result.output_ids, prompt(100 + number, 20)])

    async with pool_of(*urls) as pool:
        await asyncio.gather(*(play(pool, number) for number in range(24)))
    assert {result.server for result in later} == set(urls)
    assert min(result.cached_tokens for result in later) >= QUESTION_TOKENS


async def sampled_tokens(urls: tuple[str, str]) -> list[int]:
    counts = []
    for url in urls:
        async with SGLangClient(url) as client:
            counts.append(int((await client.server_info())["num_sampled_tokens"]))
    return counts


@pytest.mark.slow
async def test_generations_through_a_gateway_reach_all_servers_and_name_their_versions(
    urls: tuple[str, str],
) -> None:
    before = await sampled_tokens(urls)
    with gateway(*urls) as address:
        async with pool_of(*urls, gateway=address) as pool:
            results = await asyncio.gather(
                *(pool.generate(str(n), request(n, max_new_tokens=8, seed=n)) for n in range(16))
            )
    assert {result.server for result in results} == {address}
    assert {span.version for result in results for span in result.version_spans} == {7}
    after = await sampled_tokens(urls)
    assert all(now > then for now, then in zip(after, before, strict=True))
    async with SGLangClient(urls[0]) as client:
        again = await client.generate(request(3, max_new_tokens=8, seed=3))
    assert again.output_ids.tolist() == results[3].output_ids.tolist()

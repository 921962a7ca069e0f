"""What waits at a server runs in the order of its priority, and stops nothing that runs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import engine_process
from support.engines import make_model, request
from support.sglang import sglang_process

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import MAX_INT32

PRIORITIES = (
    "--enable-priority-scheduling",
    *("--priority-scheduling-preemption-threshold", str(MAX_INT32)),
)
"""As the supervisor starts SGLang."""
KINDS = ["embedded", pytest.param("sglang", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server that runs one request at once."""
    model = make_model(tmp_path / "model", seed=1)
    one = ("--max-running-requests", "1")
    running = (
        engine_process(model, *one)
        if request.param == "embedded"
        else sglang_process(model, tmp_path / "sglang.log", *PRIORITIES, *one)
    )
    with running as address:
        yield address


async def test_what_waits_runs_in_the_order_of_its_priority(url: str) -> None:
    ended = []

    async def ask(client: SGLangClient, priority: int | None, num_tokens: int = 8) -> None:
        asked = request(1, max_new_tokens=num_tokens, ignore_eos=True)
        await client.generate(asked.model_copy(update={"priority": priority}))
        ended.append(priority)

    async with SGLangClient(url) as client, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        assert await client.takes_priorities()
        tasks.create_task(ask(client, -50, 2000))
        while not (await client.loads()).num_running:
            await asyncio.sleep(0.01)
        for waiting, priority in enumerate((-40, -41, -5, -12, None), 1):
            tasks.create_task(ask(client, priority))
            while (await client.loads()).num_waiting < waiting:
                await asyncio.sleep(0.01)
    assert ended == [-50, -5, -12, -40, -41, None]

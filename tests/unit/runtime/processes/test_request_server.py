"""The child's end of a `RequestProcess`, in a real child: its replies are its own whatever the code does."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.patience import PATIENCE

from agentrl.errors import AgentWorkerError
from agentrl.runtime.processes.request_process import RequestProcess

PROGRAM = """
import asyncio, sys, time
from agentrl.errors import ConfigError
from agentrl.runtime.telemetry.loop_watch import LoopWatch
from agentrl.runtime.processes.request_server import RequestServer

server = RequestServer(LoopWatch("its loop", "nothing"))
cancelled = []

async def answer(request):
    match request["do"]:
        case "sleep":
            try:
                await asyncio.sleep(request["seconds"])
            except asyncio.CancelledError:
                cancelled.append(request["seconds"])
                raise
        case "print":
            print('{"id": 1, "forged": true}', flush=True)
        case "read":
            return {"read": sys.stdin.read()}
        case "hang":
            await asyncio.to_thread(time.sleep, 60)
        case "end":
            server.exit_when_idle()
    return {"done": request["do"], "cancelled": cancelled}

def load():
    if LACKING:
        raise ConfigError("scorers.py: no such file")
    return answer

server.run(load)
"""


@contextmanager
def server(lacking: bool = False) -> Iterator[RequestProcess]:
    program = f"LACKING = {lacking}\n{PROGRAM}"
    process = RequestProcess("the child", [sys.executable, "-c", program], dict(os.environ))
    try:
        yield process
    finally:
        process.close()


async def test_requests_run_beside_each_other() -> None:
    with server() as process:
        long = asyncio.create_task(process.ask({"do": "sleep", "seconds": 120}))
        await asyncio.sleep(0)
        reply = await process.ask({"do": "print"})
        assert reply["done"] == "print"
        assert "forged" not in reply, "what is printed is no reply"
        assert not long.done()
        assert (await process.ask({"do": "read"}))["read"] == "", "requests are not there to read"
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        assert (await process.ask({"do": "print"}))["cancelled"] == [120]


async def test_it_ends_after_what_is_being_answered() -> None:
    with server() as process:
        short = asyncio.create_task(process.ask({"do": "sleep", "seconds": 0.5}))
        await asyncio.sleep(0)
        assert (await process.ask({"do": "end"}))["done"] == "end"
        assert (await short)["done"] == "sleep"
        async with asyncio.timeout(PATIENCE):
            while process.is_alive:
                await asyncio.sleep(0.01)
        with pytest.raises(AgentWorkerError, match="the child exited with status 0"):
            await process.ask({"do": "sleep", "seconds": 120})


async def test_what_is_cancelled_before_it_begins_keeps_it_from_no_end() -> None:
    with server() as process:
        await process.ask({"do": "print"})
        withdrawn = [
            asyncio.create_task(process.ask({"do": "sleep", "seconds": 120})) for _ in range(50)
        ]
        await asyncio.sleep(0)
        for asked in withdrawn:
            asked.cancel()
        await asyncio.gather(*withdrawn, return_exceptions=True)
        await process.ask({"do": "end"})
        async with asyncio.timeout(PATIENCE):
            while process.is_alive:
                await asyncio.sleep(0.01)


async def test_why_nothing_could_be_loaded_is_told() -> None:
    no_file = pytest.raises(AgentWorkerError, match=r"^scorers\.py: no such file$")
    with server(lacking=True) as process, no_file:
        await process.ask({"do": "print"})

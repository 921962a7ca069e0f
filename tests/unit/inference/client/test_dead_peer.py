"""A generation has no time limit: that its server's machine is gone is the kernel's to notice."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response
from support.stub_server import generation, stub_server

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.wire import GenerateRequest
from agentrl.schema import SamplingParams

KEEPALIVE_TIMER = "02"
TICKS_PER_SECOND = 100


def seconds_to_the_next_question(port: int) -> float | None:
    """Return when the kernel asks whether the server on a port is there; None: never."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        timer, _, ticks = fields[5].partition(":")
        if int(fields[2].rpartition(":")[2], 16) == port and timer == KEEPALIVE_TIMER:
            return int(ticks, 16) / TICKS_PER_SECOND
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_kernel_asks_whether_a_silent_server_is_still_there() -> None:
    asked, released = asyncio.Event(), asyncio.Event()

    async def wait(_: dict[str, Any]) -> Response:
        asked.set()
        await released.wait()
        return JSONResponse(generation([1]))

    request = GenerateRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=1))
    async with stub_server(wait) as stub, SGLangClient(stub.url) as client:
        generating = asyncio.create_task(client.generate(request))
        await asked.wait()
        port = int(stub.url.rpartition(":")[2])
        while (seconds := seconds_to_the_next_question(port)) is None:
            await asyncio.sleep(0.05)  # what was sent is being acknowledged
        assert 0 < seconds <= 20
        released.set()
        await generating

import os
import sys

import psutil
import pytest

from agentrl.errors import ToolError
from agentrl.tools.servers import stdio_transport as transport


async def streams_end(code: str) -> transport.StdioServer:
    """Start a program that speaks no MCP; return what is known of it once its messages end."""
    child = transport.StdioServer("odd", None)
    command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
    async with transport.stdio_transport(command, environment=os.environ, child=child) as (
        received,
        _,
    ):
        pid = child.pid
        assert [item async for item in received] == []
    assert pid is not None
    assert not psutil.pid_exists(pid)
    return child


async def test_a_line_without_an_end_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 2**20)
    await streams_end("while True: os.write(1, b'x' * 2**16)")


async def test_a_server_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_END_SECONDS", 0.2)
    await streams_end(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); time.sleep(99)"
    )


async def test_its_last_words_are_kept() -> None:
    child = await streams_end("sys.exit('first\\nno such module: Bearer sk-123456')")
    assert child.last_line == "no such module: Bearer ***"


async def test_a_command_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ToolError, match=r"it failed to start: .*no-such-command"):
        async with transport.stdio_transport(
            ["no-such-command"],
            environment={},
            child=transport.StdioServer("odd", None),
        ):
            pass

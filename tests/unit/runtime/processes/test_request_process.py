"""A child process that answers anything, or nothing, ends in one line and takes nothing along."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from agentrl.errors import AgentWorkerError
from agentrl.runtime.processes import request_process
from agentrl.runtime.processes.request_process import RequestProcess

ECHO = "import sys\nfor line in sys.stdin: sys.stdout.write(line); sys.stdout.flush()\n"


@contextmanager
def child(program: str, **options: Any) -> Iterator[RequestProcess]:
    process = RequestProcess(
        "the child", [sys.executable, "-S", "-c", program], dict(os.environ), **options
    )
    try:
        yield process
    finally:
        process.close()


async def test_requests_are_answered_in_any_order() -> None:
    with child(ECHO) as process:
        replies = await asyncio.gather(*(process.ask({"x": n}) for n in range(20)))
    assert [reply["x"] for reply in replies] == list(range(20))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ('"x" * 2**27', r"longer than 16 MiB"),
        ('"[" * 100_000 + "\\n"', "not JSON"),
        ('"7\\n"', "not a JSON object"),
        ('"hm\\n"', "not JSON"),
        ("'{\"id\": [1]}\\n'", "not a JSON object"),
        ('\'{"id": 1, "a": [\' + "0," * 10**6 + "0]}\\n"', "more than 300000 commas"),
        ('"\\udcff\\n"', "not JSON"),
    ],
)
async def test_a_reply_that_is_none_ends_the_process_and_is_named(says: str, why: str) -> None:
    program = "import sys, time\nout = open(1, 'w', errors='surrogateescape')\ninput()\n"
    with child(program + f"out.write({says}); out.flush(); time.sleep(60)") as process:
        async with asyncio.timeout(20):
            with pytest.raises(AgentWorkerError, match=why) as refused:
                await process.ask({})
        assert not process.is_alive
        with pytest.raises(AgentWorkerError, match=why):
            await process.ask({})
    assert "\n" not in str(refused.value)


async def test_a_child_that_dies_in_the_middle_of_a_reply_is_told_by_its_status() -> None:
    program = "import os\ninput()\nos.write(1, b'{\"id\": 1, ')\nos._exit(3)"
    reason = "the child exited with status 3"
    with child(program) as process, pytest.raises(AgentWorkerError, match=reason):
        await process.ask({})


async def test_the_reason_that_a_child_gives_is_one_short_line() -> None:
    says = "import json; said = {'id': 0, 'error': 'gone\\x1b[2J\\n' + 'x' * 9999}\n"
    with (
        child(says + "input(); print(json.dumps(said), flush=True)") as process,
        pytest.raises(AgentWorkerError, match="gone") as refused,
    ):
        await process.ask({})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


async def test_a_child_that_reads_nothing_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_process, "_END_SECONDS", 0.2)
    with child("import time; time.sleep(60)") as process:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await process.ask({"text": "x" * 2**22})
        assert time.monotonic() - began < 30


FORKING = """
import json, os, sys, time
input()
reading, writing = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:  # a daemon: its parent is gone, and its session is its own
        os.setsid()
        os.write(writing, b"%d" % os.getpid())
        time.sleep(60)
    os._exit(0)
print(json.dumps({"id": 1, "daemon": int(os.read(reading, 20))}), flush=True)
"""


async def ended(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        async with asyncio.timeout(20):
            while psutil.Process(pid).status() != "zombie":
                await asyncio.sleep(0.01)


async def test_what_a_child_started_ends_with_it_and_holds_up_no_reply() -> None:
    with child(FORKING + "input()\nos._exit(3)") as process:
        daemon = (await process.ask({}))["daemon"]
        async with asyncio.timeout(20):
            with pytest.raises(AgentWorkerError, match="status 3"):
                await process.ask({})
        await ended(daemon)


async def test_what_a_child_started_ends_with_one_that_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_process, "_END_SECONDS", 0.2)
    with child(FORKING + "time.sleep(60)") as process:
        daemon = (await process.ask({}))["daemon"]
    await ended(daemon)
    assert not process.is_alive


async def test_a_child_that_a_signal_ends_is_told_by_it() -> None:
    program = "import os, signal\ninput()\nos.kill(os.getpid(), signal.SIGSEGV)"
    with child(program) as process, pytest.raises(AgentWorkerError, match="was killed by SIGSEGV"):
        await process.ask({})


def test_what_was_started_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os, sys\nfrom agentrl.runtime.processes.request_process import RequestProcess\n"
        f"process = RequestProcess('it', [sys.executable, '-S', '-c', {FORKING + 'time.sleep(60)'!r}], {{}})\n"
        "print(process.ask_and_wait({}, 20)['daemon'], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    asyncio.run(ended(int(done.stdout)))


async def test_a_child_that_prints_without_end_fills_no_log(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_process, "MAX_OUTPUT_CHARS", 2**16)
    program = "import sys\nsys.stderr.write('\\x1b[2J' + 'x' * 99 + '\\n')\n"
    program += "for _ in range(2**16): sys.stderr.write('y' * 99 + '\\n')\n"
    with child(program + ECHO) as process:
        assert (await process.ask({"x": 1}))["x"] == 1
    said = capfd.readouterr().err
    assert said.startswith("\\x1b[2J")
    assert 2**16 < len(said) < 2**18
    assert "further output is discarded" in said

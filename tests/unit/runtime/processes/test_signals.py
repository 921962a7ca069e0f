"""What a process does at its first and at its second signal, in processes of their own."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from agentrl.runtime.processes.signals import SAME_SIGNAL_SECONDS

PROGRAM = """
import asyncio
from agentrl.runtime.processes.signals import stop_on_signals

async def main():
    stop = stop_on_signals("it is tidied up first")
    print("ready", flush=True)
    await stop.wait()
    print("stopped", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_for_an_orderly_end_and_the_second_ends_at_once(
    number: signal.Signals,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(number)  # the same one, sent to the group as well
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(SAME_SIGNAL_SECONDS)
        sent = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -number
    assert time.monotonic() - sent < 30
    assert "it is tidied up first; a second signal exits immediately" in said
    assert "Traceback" not in said


ORPHAN = """
import asyncio, os, time
from agentrl.runtime.processes import signals

signals.ORPHAN_SECONDS = 1.0

async def main():
    stop = signals.stop_on_signals("it is tidied up first")
    print(os.getpid(), flush=True)
    await stop.wait()
    time.sleep(60)  # it hangs

asyncio.run(main())
"""
PARENT = """
import signal, subprocess, sys
from agentrl.runtime.processes.child_processes import end_with_parent
subprocess.run([sys.executable, "-c", sys.argv[1]], preexec_fn=end_with_parent(signal.SIGTERM))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals orphans on Linux only")
@pytest.mark.parametrize("parent_outlives_the_signal", [False, True])
def test_an_orphan_that_hangs_is_killed(parent_outlives_the_signal: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, ORPHAN], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        if parent_outlives_the_signal:
            orphan.terminate()
            time.sleep(0.5)
        parent.kill()
    assert psutil.wait_procs([orphan], timeout=30)[1] == []

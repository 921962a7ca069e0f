import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.runtime.processes import child_processes
from agentrl.runtime.processes.child_processes import Child, Supervisor, never, run_to_end
from agentrl.runtime.processes.restarts import Restarts

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def wait_until_dead(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.02)


async def test_the_log_of_a_talkative_child_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "LOG_BYTES", 10_000)
    monkeypatch.setattr(child_processes, "CHECK_SECONDS", 0.05)
    script = "import time, itertools\nfor n in itertools.count():"
    script += " print(f'{n:099d}', flush=True); time.sleep(0.0005)"
    log = tmp_path / "child.log"
    async with Supervisor() as supervisor:
        child = Child("child", [sys.executable, "-c", script], log)
        await supervisor.start(child)
        async with asyncio.timeout(30):
            while not (tmp_path / "child.log.3").exists() or int(child.log_tail(1) or 0) < 1000:
                await asyncio.sleep(0.02)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["child.log", *(f"child.log.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert sum(path.stat().st_size for path in files) < 4 * 60_000
    first = [int(path.read_text().split()[0]) for path in files]
    assert first == sorted(first, reverse=True)


async def test_leaving_the_supervisor_ends_the_children_and_nobody_else(tmp_path: Path) -> None:
    bystander = subprocess.Popen(SLEEPER, stdout=subprocess.DEVNULL)
    try:
        async with Supervisor() as supervisor:
            child = Child("sleeper", SLEEPER, tmp_path / "sleeper.log")
            await supervisor.start(child)
            assert child.pid is not None
            assert alive(child.pid)
        assert not alive(child.pid)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_bound(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready', flush=True); time.sleep(60)"
    )
    child = Child("stubborn", [sys.executable, "-c", stubborn], tmp_path / "log", stop_seconds=0.3)
    async with Supervisor() as supervisor:
        await supervisor.start(child)
        async with asyncio.timeout(60):
            while "ready" not in child.log_tail():
                await asyncio.sleep(0.02)
    assert child.pid is not None
    assert not alive(child.pid)


async def test_children_of_one_kind_end_together(tmp_path: Path) -> None:
    # Each ends once all were told to end.
    patient = (
        "import pathlib, signal, sys, time\n"
        "told = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (told / sys.argv[2]).touch())\n"
        "print('ready', flush=True)\n"
        "while len(list(told.iterdir())) < 2: time.sleep(0.01)\n"
    )
    (told := tmp_path / "told").mkdir()
    children = [
        Child(
            f"server_{number}",
            [sys.executable, "-c", patient, str(told), str(number)],
            tmp_path / f"{number}.log",
            stop_seconds=5,
        )
        for number in range(2)
    ]
    async with Supervisor() as supervisor:
        for child in children:
            await supervisor.start(child)
        async with asyncio.timeout(60):
            while not all("ready" in child.log_tail() for child in children):
                await asyncio.sleep(0.02)
    assert [child.process and child.process.returncode for child in children] == [0, 0]


async def test_what_ends_while_others_are_stopped_is_not_started_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    waits = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
    first = Child(
        "first", [sys.executable, "-c", f"{waits}raise SystemExit(3)"], tmp_path / "first"
    )
    first.restarts = Restarts(5, first_delay_seconds=0.0)
    told = (
        "import pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(flag)!r}).touch())\n"
        "print('ready', flush=True)\n"
        f"{waits}time.sleep(0.5)\n"
    )
    async with Supervisor() as supervisor:
        await supervisor.start(first)
        last = Child("last", [sys.executable, "-c", told], tmp_path / "last", stop_seconds=5)
        await supervisor.start(last)
        async with asyncio.timeout(60):
            while "ready" not in last.log_tail():
                await asyncio.sleep(0.02)
    assert first.restarts.total == 0


async def test_a_failing_child_is_restarted_so_often_and_then_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "print('boom'); raise SystemExit(3)"]
    child = Child(
        "failing", command, tmp_path / "log", restarts=Restarts(2, first_delay_seconds=0.01)
    )
    async with Supervisor() as supervisor:
        await supervisor.start(child)
        assert await supervisor.wait("failing") == 3
        assert supervisor.failed() is child
    assert child.log_path.read_text().count("boom") == 3
    assert child.log_tail() == "boom"
    assert child.restarts.total == 2
    assert "failing exited with status 3; restarting it (2 of 2" in caplog.text
    assert "--- failing exited with status 3" in child.log_path.read_text()


async def test_what_an_earlier_run_left_in_the_log_is_not_quoted(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("an old error\n")
    async with Supervisor() as supervisor:
        child = Child("child", [sys.executable, "-c", "print('new')"], log)
        await supervisor.start(child)
        assert await supervisor.wait("child") == 0
    assert child.log_tail() == "new"
    assert log.read_text() == "an old error\nnew\n"


async def test_a_failure_that_no_restart_mends_is_final(tmp_path: Path) -> None:
    child = Child(
        "failing",
        [sys.executable, "-c", "raise SystemExit(2)"],
        tmp_path / "log",
        restarts=Restarts(5, first_delay_seconds=0.01),
        may_restart=lambda child, status: status < 0,
    )
    async with Supervisor() as supervisor:
        await supervisor.start(child)
        assert await supervisor.wait("failing") == 2
        assert supervisor.num_restarts == {}


async def test_a_child_that_ends_too_early_is_restarted_and_then_reported(tmp_path: Path) -> None:
    restarts = Restarts(2, first_delay_seconds=0.01)
    child = Child("sampler_0", [sys.executable, "-c", "pass"], tmp_path / "log", restarts=restarts)
    child.is_done = never
    async with Supervisor() as supervisor, asyncio.timeout(30):
        await supervisor.start(child)
        assert await supervisor.wait("sampler_0") == 0
        assert supervisor.num_restarts == {"sampler_0": 2}
        assert supervisor.failed() is child
    assert child.log_path.read_text().count("sampler_0 exited with status 0; restarting it") == 2


async def test_a_child_that_ends_too_early_by_itself_is_reported_at_once(tmp_path: Path) -> None:
    child = Child("train_0", [sys.executable, "-c", "pass"], tmp_path / "log", restarts=Restarts(2))
    child.is_done, child.may_restart = never, lambda child, status: status < 0
    async with Supervisor() as supervisor, asyncio.timeout(30):
        await supervisor.start(child)
        assert await supervisor.wait("train_0") == 0
        assert supervisor.num_restarts == {}
        assert supervisor.failed() is child
        assert child.has_failed


async def test_a_child_that_is_done_is_left_alone(tmp_path: Path) -> None:
    child = Child("trainer", [sys.executable, "-c", "pass"], tmp_path / "log", restarts=Restarts(2))
    async with Supervisor() as supervisor, asyncio.timeout(30):
        await supervisor.start(child)
        assert await supervisor.wait("trainer") == 0
        assert supervisor.num_restarts == {}
        assert supervisor.failed() is None


async def test_a_killed_child_comes_back_under_another_pid(tmp_path: Path) -> None:
    child = Child(
        "sleeper", SLEEPER, tmp_path / "log", restarts=Restarts(1, first_delay_seconds=0.01)
    )
    async with Supervisor() as supervisor:
        await supervisor.start(child)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            while child.pid == first:
                await asyncio.sleep(0.02)
        assert supervisor.failed() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_children_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    launcher = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from agentrl.runtime.processes.child_processes import Child, Supervisor\n"
        "async def main():\n"
        "    async with Supervisor() as supervisor:\n"
        f"        child = Child('sleeper', {SLEEPER!r}, Path({str(tmp_path / 'log')!r}))\n"
        "        await supervisor.start(child)\n"
        "        print(child.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", launcher, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert alive(pid)
    process.kill()
    await process.wait()
    await wait_until_dead(pid)


FOREGROUND = """
import os, signal, sys
from agentrl.runtime.processes.child_processes import run_to_end
# A shell has the programs that it starts in the background ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    run_to_end([sys.executable, "-c", sys.argv[1]], dict(os.environ))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
GRACEFUL = """
import os, signal, time
def end(number, _):
    time.sleep(0.5)
    print("ended by", signal.Signals(number).name, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (signal.SIGKILL, ["ended by SIGTERM"]),
        (signal.SIGTERM, ["ended by SIGTERM"]),
        (signal.SIGINT, ["ended by SIGINT", "interrupted"]),
    ],
)
def test_a_program_in_the_foreground_ends_with_its_parent(
    sent: signal.Signals, expected: list[str]
) -> None:
    command = [sys.executable, "-c", FOREGROUND, GRACEFUL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(sent)
        assert parent.stdout.read().splitlines() == expected


def test_a_program_in_the_foreground_returns_its_status() -> None:
    assert run_to_end([sys.executable, "-c", "raise SystemExit(7)"], os.environ) == 7

"""A live run, and a script inside each of the ways to run a tool that tries what no tool should.

The run is the demo's, with an inspector beside it. The script looks for answers, keys, logins and what
other tools keep, changes scorers, outputs, the home and packages, asks the control planes, and writes
scores into the database.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from agentrl.config.private_paths import private_ports
from agentrl.runtime.processes.confinement import confinement_gap, open_ports_reason
from pydantic import SecretStr
from support import spy
from support.demo_run import ROOT, config_path, database_uri, logs, run_command
from support.patience import PATIENCE

import agentrl
from agentrl.config.command_line import parse_flags
from agentrl.rewards.code_runs import run_python
from agentrl.rollout.worker.resources import tools_of
from agentrl.store.private_mongod import running_uri
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(confinement_gap() is not None, reason="the machine has no namespaces"),
    pytest.mark.skipif(open_ports_reason() is not None, reason="the kernel cannot close ports"),
]
SERVER = Path(spy.__file__).with_name("spy_server.py")
STDIO = {"spy": {"command": sys.executable, "args": [str(SERVER)]}}
PLANTED = {"AGENTRL_ADMIN_KEY": "plant-01-admin-key", "WANDB_API_KEY": "plant-02-of-the-user"}

LOTTERY = """
import random
from agentrl.rewards import MCPScorerFactory
MCPScorerFactory.register_scorer("lottery")(lambda answer, truth: float(random.random() < 0.5))
"""
"""The model finds none of its tools, and what it answers is always wrong."""


@dataclass
class Live:
    """A run that goes on."""

    folder: Path
    tool_server: str
    """Address of its tool server."""
    given: dict[str, Any]
    """What the script knows: addresses and paths are no secrets."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (PLANTED | {"HOME": str(folder / "home")}).items():
            patch.setenv(name, text)
        patch.chdir(folder)
        secrets = _plant(folder)
        config = yaml.safe_load((ROOT / "assets/demo/grpo.yaml").read_text())
        config |= {
            "model_name_or_path": str(ROOT / config["model_name_or_path"]),
            "train_file": "questions.jsonl",
            "eval_file": str(ROOT / config["eval_file"]),
            "scorer_module": "lottery.py",
            "default_scorer": "lottery",
            "tool_server_command": f"{sys.executable} {SERVER} {{port}}",
        }
        (folder / "lottery.py").write_text(LOTTERY)
        (folder / "mine.yaml").write_text(yaml.safe_dump(config))
        with (folder / "run.out").open("wb") as output:
            run = subprocess.Popen(
                run_command(folder, config="mine.yaml", max_steps=100_000, num_train_epochs=1000),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            page = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "agentrl",
                    "ui",
                    "--allow_control",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _when_up(folder, run, page, secrets)
        finally:
            for process in (run, page):
                process.send_signal(signal.SIGTERM)
            for process in (run, page):
                process.wait(60)


def _plant(folder: Path) -> list[Path]:
    """Write what no tool should read, and return where."""
    questions = (ROOT / "assets/demo/train.jsonl").read_text()
    texts = {
        "questions.jsonl": questions,
        "home/.ssh/id_ed25519": "key",
        "home/.cache/huggingface/token": "token",
        ".env": "KEY=plant-03",
        "output/other/config.secrets.yaml": "key: other",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    state = ("output", "mongo", "logs", "output/config.secrets.yaml", ".agentrl/ui-token")
    return [folder / name for name in (*texts, *state)]


def _targets(folder: Path) -> list[Path]:
    """Return what no tool should change."""
    names = ("lottery.py", "mine.yaml", "output", "output/other", "home", "home/.ssh", "")
    packages = [Path(sysconfig.get_path("purelib")), Path(agentrl.__file__)]
    return [*(folder / name for name in names), *packages]


def _when_up(
    folder: Path, run: subprocess.Popen[bytes], page: subprocess.Popen[bytes], secrets: list[Path]
) -> Live:
    deadline = time.monotonic() + PATIENCE
    token = folder / ".agentrl/ui-token"
    while not (token.exists() and re.search(r"rollouts: [1-9]", logs(folder))):
        assert run.poll() is None, logs(folder) + (folder / "run.out").read_text()
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.2)
    family = [psutil.Process(page.pid), *psutil.Process(run.pid).children(recursive=True)]
    ports = {
        connection.laddr.port: " ".join(one.cmdline())
        for one in family
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    database = int(re.findall(r":(\d+)/", database_uri(folder))[0])
    (tools,) = (port for port, command in ports.items() if str(SERVER) in command)
    others = sorted(ports.keys() - {database, tools})
    assert len(others) >= 2, ports  # an engine, and the inspector
    given = {
        "paths": [str(path) for path in secrets],
        "targets": [str(path) for path in _targets(folder)],
        "database": database,
        "others": others,
        "uri": re.sub(r"//[^@/]*@", "//", database_uri(folder)).partition("?")[0],
    }
    return Live(folder, f"http://127.0.0.1:{tools}/mcp", given)


async def asked(config: ToolsConfig, live: Live, *, num_sessions: int = 1) -> list[list[str]]:
    """Return what the script found, in each of several sessions that live at the same time."""
    given = {"given": json.dumps(live.given)}
    config = config.model_copy(
        update={f"{what}_timeout_seconds": PATIENCE for what in ("connect", "start", "call")}
    )
    found = []
    async with asyncio.timeout(2 * PATIENCE), connect_tools(config) as box:
        boxes = [box.for_rollout() for _ in range(num_sessions)]
        for opening in boxes:
            own = await opening.__aenter__()
            result = await own.call(own.specs[0].name, given)
            assert not result.is_error, result.content
            found.append(json.loads(result.content))
        for opening in boxes:
            await opening.__aexit__(None, None, None)
    return found


def test_the_script_finds_all_of_it_where_nothing_confines_it(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = spy.attempts(live.given)
    assert {f"read {path}" for path in live.given["paths"]} <= set(found)
    assert {f"change {path}" for path in live.given["targets"]} <= set(found)
    assert {"connect plainly", "connect over IPv6", "connect by fast open"} <= set(found)
    assert any(re.fullmatch(r"read /proc/\d+/environ", line) for line in found)


async def test_a_server_over_pipes_gets_at_nothing(live: Live) -> None:
    words = ["--config", str(config_path(live.folder))]
    config = parse_flags(words)
    database = {"db_connection_string": SecretStr(running_uri(live.folder / "mongo") or "")}
    servers = {name: {**server, "per_rollout": True} for name, server in STDIO.items()}
    tools = {"mcp_servers": SecretStr(json.dumps({"mcpServers": servers})), "tool_server_url": None}
    config = config.model_copy(
        update={
            "store": config.store.model_copy(update=database),
            "tools": config.tools.model_copy(update=tools),
        }
    )
    assert private_ports(config) == (live.given["database"],)
    assert await asked(tools_of(config), live, num_sessions=2) == [[], []]


async def test_the_tool_server_of_the_run_gets_at_nothing(live: Live) -> None:
    assert await asked(ToolsConfig(servers=load_mcp_servers(live.tool_server)), live) == [[]]


async def test_a_server_of_an_environment_gets_at_nothing(live: Live) -> None:
    (live.folder / "servers.json").write_text(json.dumps({"mcpServers": STDIO}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl", "env", "up", "--mcp_servers", "servers.json"),
        *("--config", str(config_path(live.folder))),
        stdout=subprocess.PIPE,
        env=os.environ | {"MONGODB_URI": running_uri(live.folder / "mongo") or ""},
    )
    try:
        assert process.stdout is not None
        text = ""
        async with asyncio.timeout(PATIENCE):
            while not text.rstrip().endswith("\n}"):
                text += (await process.stdout.readline()).decode()
        found = await asked(ToolsConfig(servers=load_mcp_servers(text)), live, num_sessions=2)
        assert found == [[], []]
    finally:
        process.terminate()
        await process.wait()


async def test_a_program_that_a_scorer_runs_gets_at_nothing(live: Live) -> None:
    source = Path(spy.__file__).read_text()
    program = f"import json\n{source}\nprint(json.dumps(attempts(json.loads(input()))))"
    ended = await run_python(program, stdin=json.dumps(live.given), seconds=120)
    assert (ended.output.strip(), ended.errors) == ("[]", "")

"""Checks whether this machine can execute a run (`agentrl doctor`).

Input: a configuration. Output: one line per check, with the result or a remedy: Python,
packages, GPUs, ports, MongoDB, servers, tools, disk and memory, then the checks of `agentrl run`
itself. A private mongod is started briefly on an empty directory; nothing of the run is started,
and no files remain. Every check has a timeout.
"""

import asyncio
import importlib.metadata
import inspect
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from agentrl.config.sections import RootConfig
from agentrl.errors import AgentRLError
from agentrl.launcher.checks.extras import (
    DISTRIBUTION,
    missing_packages,
    needed_extras,
    what_to_install,
)
from agentrl.launcher.checks.server_checks import check_servers
from agentrl.launcher.start import CheckedStart, findings
from agentrl.plugin_registry import broken_plugins, installed_plugins
from agentrl.rollout.worker.resources import tools_to_start
from agentrl.runtime.gpus import machine_gpus
from agentrl.runtime.ports import is_taken
from agentrl.runtime.printable import counted
from agentrl.store import TrajectoryStore
from agentrl.store.mongod_folder import wanted_port
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, probe

CHECK_SECONDS = 30.0
"""Timeout of one check."""
_TOOL_SECONDS = 60.0
"""Timeout for one tool server: `npx` and `uvx` download the program first."""
_FREE_GIB, _FREE_MEMORY_GIB, _OPEN_FILES = 5, 2, 4096
_GIB = 1 << 30

State = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Diagnosis:
    """One line: the subject of a check, and its result."""

    state: State
    subject: str
    text: str


CheckResult = tuple[State, str]
CheckFunction = Callable[[], Iterator[CheckResult] | Awaitable[CheckResult]]


async def examine(
    config: RootConfig, check_seconds: float = CHECK_SECONDS
) -> AsyncIterator[Diagnosis]:
    """Yield a line for every requirement of a run with this configuration on this machine."""
    checks: list[tuple[str, CheckFunction]] = [
        ("python", _python),
        ("packages", lambda: _packages(config)),
        ("plugins", _plugins),
        ("torch", _torch),
        ("GPUs", _gpus),
        ("ports", lambda: _ports(config)),
        ("disk", lambda: _disk(config)),
        ("memory", _memory),
        ("MongoDB", lambda: _database(config)),
        ("servers", lambda: _servers(config)),
    ]
    for subject, check in checks:
        async for state, text in _results(check, check_seconds):
            yield Diagnosis(state, subject, text)
    async for diagnosis in _tools(config):
        yield diagnosis
    start = CheckedStart(config)
    checked = ("packages", "database", "tools", "servers")
    async for finding in findings(start, with_weights=False, without=checked):
        subject, problem = finding.subject, finding.problem
        text = "as `agentrl run` checks it"
        if subject == "GPUs":
            subject = "placement"
            rows = start.gpus.rows()
            text = "; ".join(f"{name}: {gpus}" for name, gpus in rows) or "no GPUs to assign"
        yield Diagnosis("FAIL" if problem else "ok", subject, str(problem or text))


async def _results(check: CheckFunction, seconds: float) -> AsyncIterator[CheckResult]:
    # Yield outside of the timeout, which limits the check and not its consumer.
    results: list[CheckResult] = []
    await asyncio.sleep(0)  # as in `preflight`
    try:
        # `wait_for` would swallow a Ctrl-C during code that does not wait, such as mongod's start.
        async with asyncio.timeout(seconds):
            outcome = check()
            results += [await outcome] if inspect.isawaitable(outcome) else outcome
    except TimeoutError:
        results.append(("FAIL", f"no response within {seconds:.0f} s"))
    except AgentRLError as error:
        results.append(("FAIL", str(error)))
    for result in results:
        yield result


def _python() -> Iterator[CheckResult]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    is_known = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    yield "ok" if is_known else "note", text if is_known else f"{text}; tested on Linux x86_64"


def _packages(config: RootConfig) -> Iterator[CheckResult]:
    extras, needed = missing_packages(), needed_extras(config)
    if not extras:
        yield (
            "note",
            f"{DISTRIBUTION} is not installed, only its sources: whether its requirements are is "
            "unknown",
        )
        return
    complete = [name for name, missing in extras.items() if not missing]
    version = importlib.metadata.version(DISTRIBUTION)
    yield "ok", f"{DISTRIBUTION} {version} with {', '.join(complete) or 'no extras'}"
    for name, missing in extras.items():
        if missing:
            yield "FAIL" if name in needed else "note", what_to_install(name, missing)


def _plugins() -> Iterator[CheckResult]:
    yield "ok", ", ".join(installed_plugins()) or "none"
    for name, problem in broken_plugins().items():
        yield "FAIL", f"the plugin {name!r} {problem}"


def _torch() -> Iterator[CheckResult]:
    script = "import torch; print(torch.__version__, torch.version.cuda or torch.version.hip or '')"
    version, _, toolkit = _of_torch(script).partition(" ")
    if version and toolkit and not machine_gpus():
        yield (
            "note",
            f"torch {version} is a build for GPUs (toolkit {toolkit}), which this machine lacks; the "
            "CPU build is 2 GB smaller: PyTorch's installation page has its command, for the compute "
            "platform CPU",
        )
    elif version:
        yield "ok", f"{version}, {f'built for toolkit {toolkit}' if toolkit else 'a CPU build'}"


def _gpus() -> Iterator[CheckResult]:
    gpus = machine_gpus()
    if not gpus:
        yield "note", "none found by nvidia-smi: the trainer and the embedded engine run on the CPU"
        return
    for number, gpu in enumerate(gpus):
        used = f", {gpu.used_mib} of {gpu.total_mib} MiB used" if gpu.total_mib else ""
        yield "ok", f"{number}: {gpu.name}{used}"
    script = "import torch; print(torch.__version__, torch.cuda.device_count())"
    version, _, count = _of_torch(script).partition(" ")
    if count == "0":
        yield (
            "FAIL",
            f"torch {version} sees none of them: install a CUDA build of torch, or update the "
            "driver",
        )
    elif count:
        yield "ok", f"torch {version} sees {count}"


def _ports(config: RootConfig) -> Iterator[CheckResult]:
    ports = {"mongo_port": wanted_port(config.private_mongo_dir, config.store.mongo_port)}
    if config.store.db_connection_string is not None:
        ports = {}
    if not config.inference.inference_urls:
        ports["inference_port"] = config.inference.inference_port
    taken = [f"--{name} {port}" for name, port in ports.items() if is_taken(port)]
    if taken:
        yield "note", f"{', '.join(taken)} in use: the next free port is used"
    elif ports:
        yield "ok", f"{', '.join(map(str, ports.values()))} free"


def _disk(config: RootConfig) -> Iterator[CheckResult]:
    for path in dict.fromkeys((config.run.output_path, config.private_mongo_dir.absolute())):
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free / _GIB
        is_enough = free >= _FREE_GIB
        hint = (
            ""
            if is_enough
            else (f": free some space, or choose another folder; a run needs {_FREE_GIB} GiB")
        )
        yield "ok" if is_enough else "FAIL", f"{free:.0f} GiB free for {path}{hint}"


def _memory() -> Iterator[CheckResult]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    is_enough = memory.available >= _FREE_MEMORY_GIB * _GIB
    yield (
        "ok" if is_enough else "FAIL",
        text if is_enough else f"{text}: close other programs; the demo alone needs 2 GiB",
    )
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _OPEN_FILES:
        yield "note", f"the limit of open files is {limit}; raise it with `ulimit -n {hard_limit}`"


async def _database(config: RootConfig) -> CheckResult:
    uri = config.store.db_connection_string
    started = time.monotonic()
    if uri is not None:
        async with TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name) as store:
            seconds = time.monotonic() - started
            return "ok", f"{store.redacted_uri} accepts writes ({seconds:.1f} s)"
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)):
        return "ok", (
            f"a private mongod starts and accepts writes ({time.monotonic() - started:.1f} s)"
        )


async def _servers(config: RootConfig) -> CheckResult:
    return "ok", await check_servers(config.inference)


async def _tools(config: RootConfig) -> AsyncIterator[Diagnosis]:
    command = config.tools.tool_server_command
    if command is not None:
        yield Diagnosis("note", "tools", "--tool_server_command starts with the run")
    try:
        tools = tools_to_start(config)
    except AgentRLError as error:
        yield Diagnosis("FAIL", "tools", str(error))
        return
    for name, server in tools.servers.items():
        single = tools.model_copy(update={"servers": {name: server}})
        async for state, text in _results(partial(_tool_server, single), _TOOL_SECONDS):
            yield Diagnosis(state, f"tools {name}", text)
    if not tools.servers and command is None:
        yield Diagnosis(
            "note", "tools", "none: give --mcp_servers FILE or another flag of the tools section"
        )


async def _tool_server(tools: ToolsConfig) -> CheckResult:
    specs = await probe(tools)
    return "ok", f"{counted(len(specs), 'tool')}: {', '.join(spec.name for spec in specs)[:200]}"


def _of_torch(script: str) -> str:
    """Return what a script that imports torch prints: nothing without torch."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AgentRLError(
            f"`import torch` takes longer than {CHECK_SECONDS:.0f} s, as the first import after an "
            "installation can: run `agentrl doctor` again"
        ) from None
    return process.stdout.strip()

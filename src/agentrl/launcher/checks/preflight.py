"""All checks that run before any process starts, so that a mistake is reported in one line.

Input: a configuration with consistent flags (`config.validation.checks`). This module checks the files,
servers and programs that they name. Output: findings (`launcher.start` has the road through all of
them). Nothing is started or written.
"""

import asyncio
import inspect
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.config.loading import flat_values
from agentrl.config.own_function import OWN_FUNCTION_FLAGS, is_reference
from agentrl.config.sections import (
    DataSection,
    RootConfig,
    RunSection,
)
from agentrl.config.validation.algorithm_checks import check_training
from agentrl.config.validation.checks import groups_per_step
from agentrl.errors import AgentRLError, ConfigError, StoreError, WriteError
from agentrl.launcher.checks.extras import check_extras
from agentrl.launcher.checks.policy_checks import check_policy, find_model
from agentrl.launcher.checks.question_checks import check_questions
from agentrl.launcher.checks.server_checks import check_servers, open_servers
from agentrl.launcher.cluster.child_commands import check_tool_server_command, tool_server_command
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.agent import configured_agent
from agentrl.rollout.evaluated_route import open_evaluated_route
from agentrl.rollout.worker.branching import check_tools_can_branch
from agentrl.rollout.worker.resources import (
    check_tools,
    served_context_length,
    tools_of,
    tools_to_start,
)
from agentrl.runtime.disk_space import full_disk
from agentrl.runtime.http.http_clients import check_proxy
from agentrl.runtime.ports import is_taken
from agentrl.runtime.processes.wall import named_paths, wall_gap
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.runtime.telemetry.tracker_login import check_login
from agentrl.store import TrajectoryStore
from agentrl.store.database import has_login
from agentrl.store.private_mongod import find_mongod
from agentrl.tools import ToolsConfig, probe
from agentrl.tools.tool_walls import tool_wall

_TRIAL_SECONDS = 300.0
_NOTED_START_SECONDS = 0.3
"""Processor time of a server's start that is noted, if every rollout starts it."""
_SMALL_PASS_TOKENS = 1024
"""Passes of fewer tokens are probably meant as replies of fewer tokens."""


@dataclass(frozen=True)
class Finding:
    """The result of checking one subject."""

    subject: str
    problem: AgentRLError | None = None
    """Reason why the run cannot start; None if it can."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


Check = Callable[[], Awaitable[Sequence[str] | None] | Sequence[str] | None]
"""Raises an `AgentRLError`, or returns notes."""


async def check_inputs(config: RootConfig) -> list[str]:
    """Check the inputs of a training run, and return the notes on them."""
    notes: list[str] = []
    async for finding in input_findings(config):
        if finding.problem is not None:
            raise finding.problem
        notes += finding.notes
    return notes


async def input_findings(
    config: RootConfig,
    *,
    trains: bool = True,
    with_weights: bool = True,
    without: Collection[str] = (),
) -> AsyncIterator[Finding]:
    """Yield the findings on model, questions, scorers, agent, database and all servers.

    Without weights, only the small files of a hub id are fetched.
    """
    # Empty until the model is checked, or if that fails.
    renderers: list[Renderer] = []

    def model() -> list[str]:
        renderers.append(check_policy(config, trains=trains, with_weights=with_weights))
        return [note for renderer in renderers if (note := renderer.turn_end_note) is not None]

    def trackers() -> None:
        check_login(check_trackers(config.trainer.report_to))

    async def tools() -> list[str]:
        path = find_model(config.model, with_weights=with_weights) if renderers else None
        notes = await _check_tools(config, path, *renderers)
        return [*open_to_tools(config), *notes]

    checks: dict[str, Check] = {
        "packages": partial(_check_packages, config, trains=trains),
        "folders": partial(check_folders, written_directories(config)),
        "ports": partial(_check_ports, config, trains=trains),
        "model": model,
        "trackers": trackers,
        "groups and ranks": partial(_check_groups_and_ranks, config, trains=trains),
        **({"functions": partial(check_functions, config)} if trains else {}),
        "questions": lambda: check_questions(config, *renderers, trains=trains),
        "agent": partial(_check_agent, config, trains=trains),
        "database": partial(_check_store, config, trains=trains),
        "tools": tools,
        "servers": partial(_check_own_servers, config),
    }
    for subject, check in checks.items():
        if subject not in without:
            yield await finding_of(subject, check)


async def finding_of(subject: str, check: Check) -> Finding:
    """Make a check, and return what it found."""
    await asyncio.sleep(0)  # Ctrl-C takes effect only where a coroutine waits; most checks never do
    try:
        result = check()
        notes = await result if inspect.isawaitable(result) else result
    except AgentRLError as error:
        return Finding(subject, error)
    return Finding(subject, notes=tuple(notes or ()))


def _check_packages(config: RootConfig, *, trains: bool) -> None:
    check_extras(config, trains=trains)
    agents = config.agents
    calls_others = agents.has_agent or agents.evaluated_route is not None
    if calls_others or config.rollout.agent_config_path is not None:
        check_proxy()


def check_folders(directories: Mapping[str, Path]) -> None:
    """Reject locations that are not writable; missing folders are created later."""
    for flag, path in directories.items():
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            raise ConfigError(f"--{flag} {path}: {existing} is a file; choose another folder")
        try:
            # Checking permissions is not enough: root has all, and a disk may be full or read-only.
            with tempfile.TemporaryFile(dir=existing) as probe:
                probe.write(b"trial")
        except OSError as error:
            raise ConfigError(
                f"--{flag} {path}: {existing} is not writable ({error.strerror}); choose another "
                "folder"
            ) from None
        full = full_disk(path)
        if full is not None:
            raise ConfigError(f"--{flag}: {full}; free some space, or choose another folder")


def written_directories(config: RootConfig) -> dict[str, Path]:
    """Return the directories that a run on this machine writes to, by the flag that names them."""
    directories = {"output_dir": config.run.output_path, "logs_dir": config.run.logs_dir.absolute()}
    if config.store.db_connection_string is None:
        directories["mongo_data_dir"] = config.private_mongo_dir.absolute()
    return directories


@asynccontextmanager
async def full_disk_reported(config: RootConfig) -> AsyncIterator[None]:
    """Report a full disk as the cause of any error in the block."""
    try:
        yield
    except (AgentRLError, OSError) as error:
        messages = map(full_disk, written_directories(config).values())
        message = next((text for text in messages if text is not None), None)
        if message is None:
            raise
        raise WriteError(
            f"{message}; free some space; all stored data is kept, and the same command resumes the "
            "run"
        ) from error


async def _check_agent(config: RootConfig, *, trains: bool) -> list[str]:
    async with open_evaluated_route(config.agents) as route:
        if route is not None and trains:
            raise ConfigError("--evaluated_route is for `agentrl eval`: no loss reaches that model")
        if route is not None:
            await route.check()
    if not config.agents.has_agent:
        return []
    configured_agent(config)
    tools = config.tools
    servers = (tools.mcp_servers, tools.mcp_manager_url, tools.tool_server_command)
    if not any(servers):
        return []
    return ["the agent uses its own tools: the model does not see the tool servers of this run"]


async def _check_own_servers(config: RootConfig) -> list[str]:
    if not config.rollout.enable_sampling or config.agents.evaluated_route is not None:
        return []
    await check_servers(config.inference)
    return [
        f"--inference_urls {url} answers without a key: programs of tools, and everybody else who "
        "reaches it, can sample there and replace its weights; start it with keys (docs/deploy.md)"
        for url in await open_servers(config.inference.inference_urls)
    ]


def _check_groups_and_ranks(config: RootConfig, *, trains: bool) -> list[str]:
    if not trains:
        return []
    check_training(config)
    notes, reply = [], config.sampling.max_new_tokens
    if config.trainer.max_tokens < min(reply, _SMALL_PASS_TOKENS):
        notes.append(
            f"--max_tokens {config.trainer.max_tokens} is the size of a pass of training, smaller than "
            f"one reply of --max_new_tokens {reply}, which is what limits replies"
        )
    if config.rollout.enable_sampling and not config.rollout.num_samplers:
        join = f"agentrl sample --config {config.run.output_path / 'config.yaml'}"
        notes.append(f"--num_samplers 0: sampling starts when a sampler joins: {join}")
    return notes


def _check_ports(config: RootConfig, *, trains: bool) -> None:
    """Reject explicit ports that are in use; default ports move to the next free one."""
    first = config.run.metrics_port
    for port in range(first, first + config.rollout.num_samplers + 1) if first else ():
        if is_taken(port):
            raise ConfigError(
                f"--metrics_port {first}: port {port} is in use (the trainer uses {first}, each "
                "sampler one of the following ports); choose another"
            )


def check_functions(config: RootConfig) -> None:
    """Try the user's functions in a program of its own, because the launcher never imports torch."""
    values = flat_values(config)
    own = [f"--{flag} {values[flag]}" for flag in OWN_FUNCTION_FLAGS if is_reference(values[flag])]
    if not own:
        return
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-m", "agentrl.trainer.learner.function_trial"],
            input=config.model_dump_json(include={"algorithm", "trainer", "rollout"}),
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{', '.join(own)}: no end within {_TRIAL_SECONDS:.0f} s") from None
    if trial.returncode:
        lines = trial.stderr.strip().splitlines()
        status = f"{', '.join(own)}: the trial ended with status {trial.returncode}"
        raise ConfigError(lines[-1] if lines else status)


async def _check_store(config: RootConfig, *, trains: bool) -> list[str]:
    uri = config.store.db_connection_string
    if uri is None:
        find_mongod()
        if trains and not config.data.has_training and not config.private_mongo_dir.exists():
            raise _no_questions(config.run.run_name)
        return []
    async with TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name) as store:
        if trains:
            await check_has_questions(config.data, store)
    if has_login(uri.get_secret_value()):
        return []
    return [
        "--db_connection_string asks for no password: programs of tools, and everybody else who "
        "reaches its port, can read and change the run; give MongoDB a user (docs/store.md)"
    ]


async def check_has_questions(data: DataSection, store: TrajectoryStore) -> None:
    """Check that a run has a question file, or questions in its database."""
    if not data.has_training and await store.tasks.count(split="train") == 0:
        raise _no_questions(store.database_name)


def _no_questions(database: str) -> ConfigError:
    return ConfigError(
        f"nothing to train on: database {database!r} contains no questions; give --train_file "
        "questions.jsonl, or --env"
    )


async def _check_tools(
    config: RootConfig, model_path: Path | None, renderer: Renderer | None = None
) -> list[str]:
    tools = tools_to_start(config)
    command = config.tools.tool_server_command
    if command is not None:
        check_tool_server_command(command.get_secret_value())
    check_tools_can_branch(config, tools)
    if tools.servers and config.rollout.enable_sampling:
        before = _children_seconds()
        specs = await probe(tools)
        notes = await _start_cost(config, tools, _children_seconds() - before)
        if model_path is not None and renderer is not None:
            context_length = served_context_length(config.inference, model_path)
            check_tools(config.sampling, context_length, renderer, specs)
        return notes
    return []


async def _start_cost(config: RootConfig, tools: ToolsConfig, spent: float) -> list[str]:
    """Return a note on what the start of a server for each rollout costs, if it is much.

    Args:
        config: of the run.
        tools: the servers.
        spent: processor seconds of all commands at their start.
    """
    commands = {name: one for name, one in tools.selected.items() if one.command}
    own = {name: one for name, one in commands.items() if one.per_rollout}
    if not own:
        return []
    if len(own) < len(commands):
        # Without the others, whose start no rollout repeats.
        before = _children_seconds()
        all_tools = {"server_names": None, "tool_names": None, "blocked_tools": ()}
        await probe(tools.model_copy(update={"servers": own, **all_tools}))
        spent = _children_seconds() - before
    if spent < _NOTED_START_SECONDS:
        return []
    rollouts = groups_per_step(config, config.trainer.num_processes) * config.data.num_generations
    return [
        f"each rollout starts its own {', '.join(own)} ({spent:.1f} s of processor time): "
        f"{rollouts * spent:.0f} s a step of {rollouts} rollouts; an HTTP server is told the rollout "
        "in a header and keeps a session for each (docs/tools.md)"
    ]


def _children_seconds() -> float:
    """Return the processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def check_name_is_free(section: RunSection, store: TrajectoryStore) -> None:
    """Reject `--fresh` if an earlier run of this name has a database or output.

    With `--delete_existing`, both are deleted instead, unless a process works on that run.
    """
    run = await store.runs.get()
    output = section.output_path
    # TRL's configuration creates an empty output directory.
    if run is None and not (output.exists() and any(output.iterdir())):
        return
    if not section.delete_existing:
        raise StoreError(
            f"--fresh: run {section.run_name!r} already has "
            f"{'a database' if run is not None else f'files in {output}'}; "
            "choose another run name, or add --delete_existing to delete both"
        )
    await store.maintenance.check_idle()
    await store.drop_database()
    if output.exists():
        shutil.rmtree(output)


def open_to_tools(config: RootConfig) -> list[str]:
    """Return a note on what the programs of tools write to, and on each bound that is not kept."""
    tools = tools_of(config)
    commands = [server for server in tools.servers.values() if server.command is not None]
    command = config.tools.tool_server_command
    if command is not None:
        argv = tool_server_command(command.get_secret_value(), port=0)
        tool_wall(config, named_paths(argv), named_by="--tool_server_command")
    elif not commands:
        return []
    if wall_gap() is not None:
        return [
            "programs of tools see and change all that you can, answers and keys included "
            f"(--allow_unconfined_tools; this machine cannot confine them: {wall_gap()})"
        ]
    paths = (*tools.wall.writable, *(path for one in commands for path in one.writable))
    named = "".join(f"{path}, " for path in dict.fromkeys(map(str, paths)))
    more = "" if paths else " (--tool_writable_paths names more)"
    return [f"programs of tools write only to {named}scratch folders of their own{more}"]

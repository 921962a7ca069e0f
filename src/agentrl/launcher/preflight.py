"""Everything that can be checked before a process starts, so that a mistake costs one line.

In goes a configuration whose flags fit together (`config.checks`); here the files, servers and
programs that they name are looked at, and out come findings: `agentrl run` and `agentrl eval` end at
the first problem, `--dry_run` and `agentrl doctor` show all. Nothing is started or written.
"""

import asyncio
import inspect
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from pydantic import SecretStr

from agentrl.config.algorithm_checks import check_training_sampling
from agentrl.config.checks import check_trackers, groups_per_step
from agentrl.config.sections import (
    DataSection,
    InferenceSection,
    RootConfig,
    RunSection,
    TrainerSection,
)
from agentrl.datasets.question import DEFAULT_SCORER
from agentrl.datasets.question_files import QuestionFile
from agentrl.environments import EnvironmentProcess, EnvironmentUri
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    InferenceError,
    ServerRefused,
    StoreError,
)
from agentrl.inference import SGLangClient
from agentrl.inference.supervisor.server_process import check_keys, sglang_python
from agentrl.launcher.child_commands import check_tool_server_command
from agentrl.launcher.policy_checks import check_policy, find_model
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import MCPScorerFactory, RegisteredScoring
from agentrl.rollout.agent import configured_agent
from agentrl.rollout.worker.resources import check_tools, served_context_length, tools_config
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import find_mongod
from agentrl.tools import probe

_ANSWER_SECONDS = 10.0
_MAX_KEYS = 8
"""Keys that a note lists."""


@dataclass(frozen=True)
class Finding:
    """What was seen of one subject."""

    subject: str
    problem: AgentRLError | None = None
    """Why the run cannot start; None where it can."""
    notes: tuple[str, ...] = ()
    """What a person should know before it starts."""


Check = Callable[[], Awaitable[None] | list[str] | None]
"""Raises an `AgentRLError`, or returns notes."""


async def check_inputs(config: RootConfig, *, trains: bool = True) -> list[str]:
    """Check model, questions, environments, scorers, agent, database, tool servers and inference servers.

    Args:
        config: the checked configuration.
        trains: whether the training questions are checked too.

    Returns:
        What a person should know before it starts.

    Raises:
        ConfigError: something that the user gave cannot be used.
        StoreError: the database does not answer.
    """
    notes: list[str] = []
    async for finding in findings(config, trains=trains):
        if finding.problem is not None:
            raise finding.problem
        notes += finding.notes
    return notes


async def findings(
    config: RootConfig,
    *,
    trains: bool = True,
    with_weights: bool = True,
    without: Collection[str] = (),
) -> AsyncIterator[Finding]:
    """Yield what is found of each subject, in the order of `check_inputs`.

    Args:
        config: the checked configuration.
        trains: whether the training questions are checked too.
        with_weights: fetch the whole model where a hub id names it, not just its small files.
        without: subjects that are not looked at.
    """
    # The renderer, where the model has one.
    shown: list[Renderer] = []

    def model() -> None:
        shown.append(check_policy(config, trains=trains, with_weights=with_weights))

    def trackers() -> None:
        check_trackers(config.trainer.report_to)

    async def tools() -> None:
        path = find_model(config.model, with_weights=with_weights) if shown else None
        await _check_tools(config, path, *shown)

    checks: dict[str, Check] = {
        "model": model,
        "trackers": trackers,
        "groups and ranks": partial(_check_groups_and_ranks, config, trains=trains),
        "questions": lambda: _check_questions(config, *shown, trains=trains),
        "agent": partial(_check_agent, config),
        "database": partial(_check_store, config, trains=trains),
        "tools": tools,
        "servers": partial(_check_own_servers, config),
    }
    for subject, check in checks.items():
        if subject not in without:
            yield await _finding(subject, check)


async def _finding(subject: str, check: Check) -> Finding:
    try:
        said = check()
        if not inspect.isawaitable(said):
            return Finding(subject, notes=tuple(said or ()))
        await said
    except AgentRLError as error:
        return Finding(subject, error)
    return Finding(subject)


async def findings_on_ranks(
    config: RootConfig, *, with_weights: bool = True
) -> AsyncIterator[Finding]:
    """Yield what a machine with nothing but trainer ranks needs: model and database."""

    def model() -> None:
        find_model(config.model, with_weights=with_weights)

    yield await _finding("model", model)
    yield await _finding("database", partial(_check_store, config, trains=False))


async def check_ranks(config: RootConfig) -> None:
    """Check what a machine with nothing but trainer ranks needs.

    Raises:
        ConfigError: the model cannot be used.
        StoreError: the database does not answer.
    """
    async for finding in findings_on_ranks(config):
        if finding.problem is not None:
            raise finding.problem


def _check_agent(config: RootConfig) -> list[str]:
    if not config.agents.has_agent:
        return []
    configured_agent(config.agents)
    tools = config.tools
    given = (tools.mcp_servers, tools.mcp_manager_url, tools.tool_server_command)
    if not any(given):
        return []
    return [
        "the agent brings its own tools: the tool servers of this run are not shown to the model"
    ]


async def _check_own_servers(config: RootConfig) -> None:
    if config.rollout.enable_sampling:
        await check_servers(config.inference)


def _check_groups_and_ranks(config: RootConfig, *, trains: bool) -> None:
    if not trains:
        return
    check_training_sampling(config.sampling)
    _check_group_size(config.data)
    _check_main_port(config.trainer)


def _check_main_port(trainer: TrainerSection) -> None:
    """Refuse a port that is taken; on one machine the ranks find another one by themselves."""
    if trainer.num_machines == 1:
        return
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", trainer.main_process_port)) == 0:
            raise ConfigError(
                f"--main_process_port {trainer.main_process_port} is taken here; give all machines "
                "another one"
            )


def _check_group_size(data: DataSection) -> None:
    if data.has_training and data.num_generations == 1:
        raise ConfigError(
            "--num_generations 1: a try is judged against the others of its question, so that "
            "nothing would be learned; give 2 or more"
        )


def _check_questions(
    config: RootConfig, renderer: Renderer | None = None, *, trains: bool
) -> list[str]:
    data, notes = config.data, []
    scoring = RegisteredScoring.load(config.rollout)
    for path in (data.train_file if trains else None, data.eval_file):
        if path is None:
            continue
        with QuestionFile(path, data, MCPScorerFactory.check_question) as questions:
            for scorer in questions.scorers:
                scoring.check(scorer)
            if questions.has_images and renderer is not None:
                _check_images(config, path, renderer)
            if questions.unread_keys:
                keys = list(questions.unread_keys)
                more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
                notes.append(
                    f"nothing reads these keys of {path}: {', '.join(keys[:_MAX_KEYS])}{more}"
                )
            if path == data.train_file:
                notes += _steps_beyond(config, len(questions))
            if data.default_scorer is None and questions.num_without_scorer:
                notes.append(
                    f"{questions.num_without_scorer} question(s) of {path} name no scorer: `"
                    f"{DEFAULT_SCORER}` compares answers with the reference (--default_scorer)"
                )
    for flag, uri in data.environments.items():
        if trains or flag != "env":
            num_tasks = _num_environment_tasks(uri, data, f"--{flag}")
            notes.append(f"--{flag} {uri}: {num_tasks} tasks")
            notes += _steps_beyond(config, num_tasks) if flag == "env" else []
    return notes


def _steps_beyond(config: RootConfig, num_questions: int) -> list[str]:
    """Return a note where the questions end before the steps that were asked for."""
    num_groups = groups_per_step(config, config.trainer.num_processes)
    max_steps, epochs = config.trainer.max_steps, config.data.num_train_epochs
    num_steps = -(-num_questions * epochs // num_groups)
    if "max_steps" not in config.trainer.model_fields_set or num_steps >= max_steps:
        return []
    return [
        f"--max_steps {max_steps}: {num_questions} question(s) are at most {num_steps} step(s) of "
        f"{num_groups}; --num_train_epochs {-(-max_steps * num_groups // num_questions)} asks "
        "them more often"
    ]


def _num_environment_tasks(uri: str, data: DataSection, flag: str) -> int:
    with EnvironmentProcess(EnvironmentUri.parse(uri, flag), data, flag, quiet=True) as environment:
        return environment.size()


def _check_images(config: RootConfig, path: Path, renderer: Renderer) -> None:
    if not renderer.shows_images_of("user"):
        raise ConfigError(
            f"{path} has images, and the chat template of {config.model.model_name_or_path} "
            "shows none; take a vision model"
        )
    if not renderer.image_processor:
        raise ConfigError(
            f"{path} has images, and {config.model.model_name_or_path} has no "
            "preprocessor_config.json, which says how the model reads them"
        )


async def _check_store(config: RootConfig, *, trains: bool) -> None:
    uri = config.store.db_connection_string
    if uri is None:
        find_mongod()
        if trains and not config.data.has_training and not config.private_mongo_dir.exists():
            raise _no_questions(config.run.run_name)
        return
    async with TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name) as store:
        if trains:
            await check_has_questions(config.data, store)


async def check_has_questions(data: DataSection, store: TrajectoryStore) -> None:
    """Refuse a run without a file of questions whose database holds none.

    Raises:
        ConfigError: there is nothing to train on.
    """
    if not data.has_training and await store.tasks.count(split="train") == 0:
        raise _no_questions(store.database_name)


def _no_questions(database: str) -> ConfigError:
    return ConfigError(
        f"nothing to train on: database {database!r} holds no questions; give "
        "--train_file questions.jsonl, or --env"
    )


async def _check_tools(
    config: RootConfig, model_path: Path | None, renderer: Renderer | None = None
) -> None:
    # The written configuration of a run names the server that it had.
    tools = tools_config(config.tools.model_copy(update={"tool_server_url": None}))
    command = config.tools.tool_server_command
    if command is not None:
        check_tool_server_command(command.get_secret_value())
    if tools.servers and config.rollout.enable_sampling:
        specs = await probe(tools)
        if model_path is not None and renderer is not None:
            context_length = served_context_length(config.inference, model_path)
            check_tools(config.sampling, context_length, renderer, specs)


async def check_servers(inference: InferenceSection) -> None:
    """Check that servers answer, or can be started.

    Raises:
        ConfigError: one does not, or SGLang or a key is missing.
    """
    if not inference.inference_urls:
        check_keys(inference)
        if inference.inference_backend == "sglang":
            sglang_python()
        return
    for url in inference.inference_urls:
        await _check_answers("--inference_urls", url)
        await _check_is_server(url, inference.inference_api_key)
    if inference.inference_gateway is not None:
        await _check_answers("--inference_gateway", inference.inference_gateway)


async def _check_answers(flag: str, url: str) -> None:
    async with httpx.AsyncClient(timeout=_ANSWER_SECONDS) as client:
        try:
            await client.get(f"{url.rstrip('/')}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"{flag} {url}: no server answers there ({type(error).__name__}); start it, or "
                "leave the flag out"
            ) from None


async def _check_is_server(url: str, key: SecretStr | None) -> None:
    """Refuse an address that answers but takes no weights: a gateway, or another kind of server."""
    async with SGLangClient(url, api_key=key) as client:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await client.model_info()
        except (InferenceError, TimeoutError) as error:
            hint = "look at its log"
            if isinstance(error, ServerRefused) and error.status == 401:
                hint = "its key goes into AGENTRL_API_KEY"
            elif isinstance(error, ServerRefused) and error.status == 404:
                hint = "give the servers themselves, and a gateway with --inference_gateway"
            raise ConfigError(
                f"--inference_urls {url} is not an inference server: {hint}"
            ) from None


async def check_name_is_free(section: RunSection, store: TrajectoryStore) -> None:
    """Refuse `--fresh` while an earlier run of this name has a database or output.

    With `--delete_existing`, both are deleted instead, unless a process works on that run.

    Raises:
        StoreError: the run exists and may not be deleted, or is alive.
    """
    run = await store.runs.get()
    output = section.output_path
    # TRL's configuration makes its directory.
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

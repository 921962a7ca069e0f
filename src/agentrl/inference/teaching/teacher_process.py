"""The process behind `agentrl teach`: opens each teacher's server, and teaches until the run ends.

A teacher is the model of a server that runs elsewhere, or a checkpoint that a server is started on
here. It joins the run only if its tokenizer is the policy's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.named_files import existing_or_shipped
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, ServerUnreachable
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.supervisor.server_supervisor import lone_server
from agentrl.inference.teaching.privileged_prompts import PrivilegedPrompts
from agentrl.inference.teaching.teacher_loop import LEASE_SECONDS, TeacherLoop
from agentrl.inference.teaching.vocabularies import check_same_tokens
from agentrl.models.checkpoints.resolve import resolve_model, resolve_tokenizer
from agentrl.renderers.renderer import Renderer
from agentrl.runtime.ending_tasks import joint_tasks
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.runtime.processes.signals import stop_on_signals, stopped_within
from agentrl.schema import Teacher
from agentrl.schema.run import TEACHER_NAME
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 5
"""Deaths in a row of a server that is started here, without a record taught in between."""
_RESTART_SECONDS = 2.0
_RUN_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher as the command line describes it."""

    name: str
    model: str
    """Address of a server, or path or name of a checkpoint."""

    @property
    def is_address(self) -> bool:
        """Whether its server runs elsewhere."""
        return self.model.startswith(("http://", "https://"))


@dataclass(frozen=True)
class TeachingSettings:
    """What all teachers of a process share."""

    prompts: tuple[str, ...] = ("",)
    """Texts before every conversation; see `Teacher.prompts`."""
    solution_score: float = 1.0
    """Least score of an attempt that they show as a solution."""
    tokenizer: str | None = None
    """Path or name of the teachers' tokenizer; by default, that of their models."""
    concurrency: int = 16
    exit_when_taught: bool = False


def parse_teacher(text: str) -> TeacherPlan:
    """Read a value of `--teacher`, NAME=MODEL."""
    name, equals, model = text.partition("=")
    if not (TEACHER_NAME.fullmatch(name) and equals and model):
        raise ConfigError(
            f"--teacher {text}: give NAME=URL or NAME=PATH; a name has letters, digits, - and _"
        )
    if "://" not in model:  # the documentation names the demo's
        model = str(existing_or_shipped(Path(model)))
    return TeacherPlan(name, model)


async def run_teachers(
    config: RootConfig,
    store: TrajectoryStore,
    plans: Sequence[TeacherPlan],
    settings: TeachingSettings,
) -> None:
    """Teach until the run has ended and nothing is left, or until SIGTERM or SIGINT."""
    stop = stop_on_signals("releasing the records that are not taught yet")
    if not await _has_started(store, stop):
        return
    async with joint_tasks() as group:
        for plan in plans:
            group.create_task(_run_teacher(config, store, plan, settings, stop))


async def _has_started(store: TrajectoryStore, stop: asyncio.Event) -> bool:
    """Wait, like samplers, until the trainer has created the run; return False if stopped before."""
    is_told = False
    while await store.runs.get() is None:
        if not is_told:
            logger.info("waiting: the run has not started")
            is_told = True
        if await stopped_within(stop, _RUN_POLL_SECONDS):
            return False
    return True


async def _run_teacher(
    config: RootConfig,
    store: TrajectoryStore,
    plan: TeacherPlan,
    settings: TeachingSettings,
    stop: asyncio.Event,
) -> None:
    owner = new_lease_owner()
    try:
        async with joint_tasks() as group:
            showing = group.create_task(_show_alive(store, plan.name, owner))
            await _teach_until_end(config, store, plan, settings, stop)
            showing.cancel()
    finally:
        await store.teaching.leave(plan.name, owner)


async def _show_alive(store: TrajectoryStore, name: str, owner: str) -> None:
    while True:
        await store.teaching.show_alive(name, owner, LEASE_SECONDS)
        await asyncio.sleep(LEASE_SECONDS / 3)


async def _teach_until_end(
    config: RootConfig,
    store: TrajectoryStore,
    plan: TeacherPlan,
    settings: TeachingSettings,
    stop: asyncio.Event,
) -> None:
    num_deaths = 0
    while True:
        async with _server(config, plan) as client:
            loop = await _opened(config, store, plan, settings, client)
            try:
                await loop.run(stop)
                return
            except ServerUnreachable as error:
                num_deaths = 1 if loop.counts.num_records else num_deaths + 1
                if num_deaths > _MAX_RESTARTS:
                    raise
                logger.warning("teacher %s: its server is started again: %s", plan.name, error)
        if await stopped_within(stop, _RESTART_SECONDS):
            return


@asynccontextmanager
async def _server(config: RootConfig, plan: TeacherPlan) -> AsyncIterator[SGLangClient]:
    if plan.is_address:
        async with SGLangClient.of(plan.model, config.inference) as client:
            yield client
        return
    opened = lone_server(
        config,
        resolve_model(plan.model),
        version=0,
        adapter=None,
        log_name=f"teacher_{plan.name}",
    )
    async with opened as service, SGLangClient.of(service.base_url, config.inference) as client:
        yield client


async def _opened(
    config: RootConfig,
    store: TrajectoryStore,
    plan: TeacherPlan,
    settings: TeachingSettings,
    client: SGLangClient,
) -> TeacherLoop:
    """Check a teacher, and have it join the run."""
    model = (await client.model_info()).model_path
    path = _tokenizer_path(plan, settings.tokenizer or model)
    policy_path = resolve_tokenizer(config.model.model_name_or_path)
    check_same_tokens(f"--teacher {plan.name}", path, policy_path)
    teacher = Teacher(model=model, prompts=settings.prompts, solution_score=settings.solution_score)
    await store.teaching.register(plan.name, teacher)
    logger.info("teacher %s (%s) joins run %s", plan.name, model, config.run.run_name)
    return TeacherLoop(
        store,
        client,
        plan.name,
        prompts=PrivilegedPrompts(
            settings.prompts,
            Renderer.of_policy(config.model, policy_path),
            store,
            solution_score=settings.solution_score,
        ),
        concurrency=settings.concurrency,
        exit_when_taught=settings.exit_when_taught,
        restarts_server=not plan.is_address,
    )


def _tokenizer_path(plan: TeacherPlan, model: str) -> Path:
    try:
        return resolve_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(
            f"--teacher {plan.name}: its tokenizer cannot be compared with the policy's: {error}; "
            "give --teacher_tokenizer"
        ) from error

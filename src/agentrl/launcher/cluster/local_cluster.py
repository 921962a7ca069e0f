"""The processes of one machine around a trainer or an evaluation: store, tools, servers, samplers.

Input: a checked configuration. Output: running children, each with its own log file, and a
configuration that names their addresses. All of them stop with the cluster. This module is
independent of what they compute.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import SecretStr

from agentrl.config.loading import secret_environment, write_config
from agentrl.config.private_files import make_private
from agentrl.config.secrets import SecretUrl, remember
from agentrl.config.sections import RootConfig
from agentrl.errors import AgentRLError, ConfigError, DataInUse, StoreError
from agentrl.launcher.cluster.child_commands import (
    RANK_VARIABLES,
    agentrl_command,
    tool_server_command,
    trainer_command,
)
from agentrl.launcher.cluster.gpu_placement import NO_GPUS, GpuMap
from agentrl.launcher.cluster.recovery import keep_running, last_error, was_interrupted
from agentrl.launcher.cluster.resume_checks import already_running
from agentrl.launcher.cluster.tool_server_start import wait_for_tools
from agentrl.rollout.worker.resources import check_shown_tools, tools_config
from agentrl.runtime.ports import free_port
from agentrl.runtime.processes.child_processes import Child, Supervisor, never
from agentrl.runtime.processes.restarts import Restarts
from agentrl.runtime.processes.signals import stop_on_signals
from agentrl.runtime.processes.wall import Wall, named_paths, scratch_directory
from agentrl.schema import ENDED_RUNS
from agentrl.store import TrajectoryStore
from agentrl.store.database import with_database
from agentrl.store.mongod_folder import wanted_port
from agentrl.store.private_mongod import EmbeddedMongo, running_uri
from agentrl.tools.tool_walls import tool_wall

T = TypeVar("T")

SAMPLER_END_SECONDS = 25.0
SAMPLER_RESTARTS = 20
RESTARTS = 5
"""How often any other process is restarted within `restarts.WINDOW_SECONDS`."""
STOP_SECONDS = 15.0
"""Grace period of a child after SIGTERM before it is killed."""
SUPERVISOR_STOP_SECONDS = 2 * STOP_SECONDS
"""Grace period of `agentrl serve`, which first gives its server `STOP_SECONDS`."""
TRAINER_STOP_SECONDS = 120.0
"""The trainer ends its step and saves."""
_TRAINER = "train_0"
_KEYS = ("inference_api_key", "inference_admin_key")
_KEY_BYTES = 32
_HIDDEN_FROM_SAMPLERS = ("AGENTRL_ADMIN_KEY",)


class LocalCluster:
    """Async context around the children.

    Attributes:
        config: the configuration; addresses are added as children start.
    """

    def __init__(self, config: RootConfig, *, gpus: GpuMap = NO_GPUS, role: str = "") -> None:
        """Start nothing yet; names of logs and configuration files begin with the role (`eval`)."""
        self.config = config
        self._gpus = gpus
        self._role = f"{role}_" if role else ""
        self._generated_keys: list[str] = []
        self._stack = AsyncExitStack()
        self._supervisor = Supervisor()
        self._mongod_restarts = Restarts(RESTARTS)
        self._mongod_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, traceback)

    @property
    def config_path(self) -> Path:
        """The resolved configuration that children, and samplers started by hand, read."""
        return self.config.run.output_path / f"{self._role}config.yaml"

    async def open_store(self) -> TrajectoryStore:
        """Start the private mongod unless a database was given, connect, and generate missing keys.

        Children receive the password of a private mongod in their environment; processes that join
        later with the written configuration read it from the data directory.
        """
        output = self.config.run.output_path
        make_private(output)
        # Absolute, for processes that join from another directory.
        run = self.config.run.model_copy(update={"output_dir": output})
        self.config = self.config.model_copy(update={"run": run})
        self._generate_keys()
        uri = self.config.store.db_connection_string
        if uri is None:
            data_dir = self.config.private_mongo_dir.absolute()
            uri = SecretStr(await self._private_uri(data_dir))
            update = {"db_connection_string": uri, "mongo_data_dir": data_dir}
            section = self.config.store.model_copy(update=update)
            self.config = self.config.model_copy(update={"store": section})
        store = await self._stack.enter_async_context(
            TrajectoryStore.connect(uri.get_secret_value(), self.config.run.run_name)
        )
        self._store = store
        # Entered after the store, so that children are stopped before the store closes.
        await self._stack.enter_async_context(self._supervisor)
        return store

    @asynccontextmanager
    async def _supervised(self, mongo: EmbeddedMongo) -> AsyncIterator[None]:
        self._mongod_task = asyncio.create_task(keep_running(mongo, self._mongod_restarts))
        try:
            yield
        finally:
            self._mongod_task.cancel()
            await asyncio.wait({self._mongod_task})

    @property
    def num_restarts(self) -> dict[str, int]:
        """Number of restarts of every process that was restarted, by its name."""
        mongod_restarts = self._mongod_restarts.total
        return self._supervisor.num_restarts | (
            {"mongod": mongod_restarts} if mongod_restarts else {}
        )

    def _generate_keys(self) -> None:
        """Generate the missing keys of servers that are started here.

        Every user of the machine, and web pages in their browsers, can reach loopback addresses.
        """
        inference = self.config.inference
        if inference.inference_urls:
            return
        self._generated_keys = [name for name in _KEYS if getattr(inference, name) is None]
        generated = {
            name: SecretStr(secrets.token_urlsafe(_KEY_BYTES)) for name in self._generated_keys
        }
        remember(key.get_secret_value() for key in generated.values())
        section = inference.model_copy(update=generated)
        self.config = self.config.model_copy(update={"inference": section})

    async def _private_uri(self, data_dir: Path) -> str:
        # An evaluation may use the database of a live run; the run itself may exist only once.
        running = running_uri(data_dir) if self._role else None
        if running is not None:
            return with_database(running, self.config.run.run_name)
        mongo = EmbeddedMongo(data_dir, wanted_port(data_dir, self.config.store.mongo_port))
        # Entered in the main thread: the kernel kills mongod when the thread that started it ends.
        try:
            self._stack.enter_context(mongo)
        except DataInUse as error:
            raise already_running(self.config.run.run_name, error.holder) from None
        await self._stack.enter_async_context(self._supervised(mongo))
        return mongo.uri(self.config.run.run_name)

    async def start_tool_server(self) -> None:
        """Start the user's tool server, if one is to be started, and check its tools.

        A model may make its tools read their environment, other processes and files: the server
        gets only the named variables, and a wall stands around it.
        """
        command = self.config.tools.tool_server_command
        if command is None:
            return
        port = free_port()
        argv = tool_server_command(command.get_secret_value(), port)
        wall = self._tool_wall(argv)
        child = self._child("tools", wall.command(argv), RESTARTS, gpus=self._gpus.free)
        names = self.config.tools.tool_server_env
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigError(
                f"--tool_server_env: the environment variable {missing[0]} is not set"
            )
        passed = {name: os.environ[name] for name in names}
        child.environment = (
            wall.environment()
            | passed
            | self._gpus.environment(self._gpus.free)
            | {"PYTHONUNBUFFERED": "1"}
        )
        child.inherits_environment = False
        await self._supervisor.start(child)
        address = f"http://127.0.0.1:{port}/mcp"
        tools = self.config.tools.model_copy(update={"tool_server_url": SecretUrl(address)})
        specs = await wait_for_tools(tools_config(tools), child, address, names)
        child.is_done = never
        self.config = self.config.model_copy(update={"tools": tools})
        check_shown_tools(self.config, specs)

    def _tool_wall(self, argv: Sequence[str]) -> Wall:
        scratch = Path(self._stack.enter_context(scratch_directory("agentrl-tools-")))
        wall = tool_wall(self.config, named_paths(argv), named_by="--tool_server_command")
        devices = Path("/dev").glob("nvidia*") if self._gpus.free else ()
        return replace(wall, scratch=scratch, readable=(*wall.readable, *devices))

    def write_config(self) -> None:
        """Write the configuration, with all addresses, for children and users."""
        write_config(self.config, self.config_path, self._generated_keys)

    async def start_servers(self) -> None:
        """Start one `agentrl serve` for each server, or a single one for all `--inference_urls`.

        Every server chooses its own port.
        """
        inference = self.config.inference
        num_supervisors = 1 if inference.inference_urls else inference.num_inference_servers
        argv = agentrl_command("serve", self.config_path)
        for number in range(num_supervisors):
            # A failed server is restarted by its supervisor; only the supervisor's own failure is
            # final.
            child = self._child(
                f"serve_{number}",
                argv,
                RESTARTS,
                gpus=self._gpus.of_server(number),
                may_restart=lambda child, status: status == 0 or was_interrupted(child, status),
                stop_seconds=SUPERVISOR_STOP_SECONDS,
            )
            child.is_done = never
            await self._supervisor.start(child)

    async def start_samplers(self) -> None:
        """Start the sampler processes, which wait for servers and tasks."""
        for number in range(self.config.rollout.num_samplers):
            flags = self._metrics_flags(number + 1)
            argv = agentrl_command("sample", self.config_path, *flags)
            child = self._child(
                f"sampler_{number}",
                argv,
                SAMPLER_RESTARTS,
                gpus=self._gpus.free,
                withheld=_HIDDEN_FROM_SAMPLERS,
                stop_seconds=self.config.rollout.drain_seconds + STOP_SECONDS,
            )
            child.is_done = self._may_end
            await self._supervisor.start(child)

    async def _may_end(self) -> bool:
        """Return whether a sampler may end."""
        return self.config.rollout.exit_when_done or await self._has_ended()

    async def _has_ended(self) -> bool:
        """Return whether the run has ended, as its database says."""
        try:
            run = await self._store.runs.get()
        except StoreError:
            return False
        return run is not None and run.status in ENDED_RUNS

    async def wait_for_samplers(self) -> None:
        """Wait until the samplers have finished their running groups.

        They exit once the run is completed; `SAMPLER_END_SECONDS` limits the wait.
        """
        names = [f"sampler_{number}" for number in range(self.config.rollout.num_samplers)]
        tasks = [asyncio.create_task(self._supervisor.wait(name)) for name in names]
        if tasks:
            await asyncio.wait(tasks, timeout=SAMPLER_END_SECONDS)
            for task in tasks:
                task.cancel()

    async def start_trainer(self) -> Child:
        """Start the trainer's ranks, under `accelerate launch` if there are several.

        The log file is that of rank 0, as it would name it itself. A trainer that was killed, or
        that lost the database, continues from its last checkpoint. It has failed if it ends with
        status 0 before the run has ended: code of the user called exit.
        """
        child = self._child(
            _TRAINER,
            trainer_command(self.config.trainer, self.config_path),
            RESTARTS,
            gpus=self._gpus.trainer,
            may_restart=was_interrupted,
            stop_seconds=TRAINER_STOP_SECONDS,
        )
        child.environment = {**child.environment, **RANK_VARIABLES}
        child.is_done = self._has_ended
        await self._supervisor.start(child)
        return child

    async def stop_trainer(self) -> None:
        """Stop the trainer, if it runs: it saves what it has done so far."""
        await self._supervisor.stop(_TRAINER)

    async def wait(self, name: str) -> int:
        """Wait for a child to exit, and return its exit status."""
        return await self.watch(self._supervisor.wait(name), except_child=name)

    async def watch(self, work: Coroutine[Any, Any, T], *, except_child: str = "") -> T:
        """Return the result of `work`, unless a child fails permanently first.

        `work` handles the failure of `except_child` itself.
        """
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=0.5)
                if self._mongod_task is not None and self._mongod_task.done():
                    self._mongod_task.result()  # it ends only with an error: raise it
                failed = self._supervisor.failed()
                if failed is not None and failed.name != except_child:
                    raise AgentRLError(
                        f"{failed.name} failed; last lines of {failed.log_path}: "
                        f"{last_error(failed)}"
                    )
            return working.result()
        finally:
            working.cancel()

    def _metrics_flags(self, offset: int) -> tuple[str, ...]:
        """Return the flags that give a child its own metrics port, following the trainer's."""
        port = self.config.run.metrics_port
        return () if not port else ("--metrics_port", str(port + offset))

    def _child(
        self,
        name: str,
        argv: Sequence[str],
        restarts: int,
        *,
        gpus: Sequence[int],
        withheld: Collection[str] = (),
        may_restart: Callable[[Child, int], bool] = lambda child, status: True,
        stop_seconds: float = STOP_SECONDS,
    ) -> Child:
        run = self.config.run
        return Child(
            name=name,
            argv=argv,
            log_path=run.logs_dir / f"{run.run_name}_{self._role}{name}.log",
            # Withheld variables are empty rather than absent: the child would inherit them otherwise.
            environment=secret_environment(self.config)
            | dict.fromkeys(withheld, "")
            | self._gpus.environment(gpus)
            | _child_settings(stop_seconds),
            restarts=Restarts(restarts),
            may_restart=may_restart,
            stop_seconds=stop_seconds,
        )


async def until_interrupted(work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None after SIGINT or SIGTERM.

    A second signal kills this process, and the kernel kills its children.
    """
    working = asyncio.create_task(work)
    interrupted = stop_on_signals("stopping all processes")
    waiting = asyncio.create_task(interrupted.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return None


def _child_settings(stop_seconds: float) -> dict[str, str]:
    """Return variables for a child: it stops its ranks before it is killed, and buffers no output."""
    return {
        # Ranks run in separate sessions, so their launcher must stop them before it is killed.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(stop_seconds) - 3),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }

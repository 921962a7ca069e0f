"""Supervises inference servers: the process behind `agentrl serve`.

A server is started (or is already running at a URL), registered, kept up to date and restarted. It
is `up` in the store only while it answers and serves the current policy, or while the trainer's
publisher is updating it.

    start ─> healthy ─> catch up ─> register ─> heartbeat ... ─> died or unusable ─> start
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.addresses import http_address
from agentrl.config.sections import InferenceSection, ModelSection, PublishSection, RootConfig
from agentrl.errors import InferenceError, ServerUnreachable, ServerUnusable
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.server_keys import proof
from agentrl.inference.supervisor.device_sharing import DeviceSharing
from agentrl.inference.supervisor.server_backend import server_backend
from agentrl.inference.supervisor.server_heartbeat import BEAT_SECONDS, ServerHeartbeat
from agentrl.inference.supervisor.server_process import ServerProcess, check_keys
from agentrl.inference.weight_sync.publisher import latest_files
from agentrl.inference.weight_sync.server_operations import update_to_policy
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.runtime.ending_tasks import end_tasks, joint_tasks
from agentrl.runtime.processes.child_processes import Supervisor
from agentrl.runtime.processes.restarts import ending
from agentrl.runtime.processes.signals import stop_on_signals
from agentrl.schema import InferenceService, Policy
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

URL_SECONDS = 120.0
"""How long a server of `--inference_urls`, which responded when the run was checked, may be away."""
MAX_RESTARTS = 5
MAX_CRASHES = 20
"""Consecutive deaths of a server while it was serving. Requests may be the cause; samplers stop
sending those that crash servers.
"""
FORGIVEN_AFTER_SECONDS = 600.0
"""After running for this long, a server may again die as often as a new one."""


async def run_server(config: RootConfig, uri: str) -> None:
    """Supervise this process's servers until SIGTERM or SIGINT; a second signal exits at once."""
    stop = stop_on_signals("stopping the server first")
    plans = _plans(config)
    logger.info("starting %d server(s) for run %s", len(plans), config.run.run_name)
    async with TrajectoryStore.connect(uri, database=config.run.run_name) as store:
        supervisors = [
            ServerSupervisor(
                store,
                plan,
                model=config.model,
                inference=_with_weight_roots(config, plan),
                publish=config.publish,
            )
            for plan in plans
        ]
        start_seconds = (
            URL_SECONDS
            if config.inference.inference_urls
            else server_backend(config.inference.inference_backend).start_seconds
        )
        async with joint_tasks() as group:
            for supervisor in supervisors:
                group.create_task(
                    supervisor.run(stop, max_restarts=MAX_RESTARTS, start_seconds=start_seconds)
                )


@asynccontextmanager
async def lone_server(
    config: RootConfig, weights: Path, *, version: int, adapter: str | None, log_name: str
) -> AsyncIterator[InferenceService]:
    """Serve a version, unregistered, until the block exits.

    Args:
        config: names the model and the backend.
        weights: directory of the version's weights, or of its adapter.
        version: their version number.
        adapter: name of the adapter; None if `weights` holds the whole model.
        log_name: part of the name of its log file.
    """
    check_keys(config.inference)
    model_path = weights if adapter is None else resolve_model(config.model.model_name_or_path)
    roots = (*config.inference.weight_roots, weights)
    inference = config.inference.model_copy(update={"weight_roots": roots})
    start_seconds = server_backend(inference.inference_backend).start_seconds
    async with Supervisor() as children:
        process = ServerProcess(
            children,
            inference=inference,
            model=config.model,
            log_prefix=str(config.run.logs_dir / f"{config.run.run_name}_{log_name}_"),
            seed=config.run.seed,
        )
        with process:
            port = await process.start(model_path, version if adapter is None else 0)
            url = http_address(inference.inference_host, port)
            async with SGLangClient.of(url, inference) as client:
                healthy = asyncio.create_task(_until_healthy(client, process, start_seconds))
                died = asyncio.create_task(process.wait())
                events: set[asyncio.Task[Any]] = {healthy, died}
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                died.cancel()
                if not healthy.done():
                    healthy.cancel()
                    log = process.log_path(port)
                    raise InferenceError(
                        f"the server exited during startup; the end of {log}: {process.log_tail()}"
                    )
                healthy.result()
                if adapter is not None:
                    policy = Policy(
                        version=version, path=str(weights), adapter=adapter, num_bytes=0
                    )
                    await update_to_policy(client, policy, config.publish)
            yield InferenceService(
                id=url,
                base_url=url,
                backend=inference.inference_backend,
                model_path=str(model_path),
                policy_version=version,
                adapter=adapter,
                data_proof=proof(url, inference.inference_api_key),
            )


@dataclass(frozen=True)
class ServerPlan:
    """The server to supervise."""

    url: str | None
    """Address of a server that runs elsewhere; None for one that is started here."""
    model_path: Path
    """Weights of version 0; only their name for a server that runs elsewhere."""
    log_prefix: str
    """Path of the log file up to the port in its name."""
    seed: int


@dataclass(frozen=True)
class _End:
    """How a server ended: on its own, or because it must be restarted."""

    reason: str
    is_death: bool = False


class ServerSupervisor:
    """Supervises one server; `run` returns on request and raises if the server cannot run."""

    def __init__(
        self,
        store: TrajectoryStore,
        plan: ServerPlan,
        *,
        model: ModelSection,
        inference: InferenceSection,
        publish: PublishSection,
    ) -> None:
        self._store = store
        self._plan = plan
        self._model = model
        self._inference = inference
        self._publish = publish
        self._device = (
            DeviceSharing(store, publish.publish_timeout_seconds) if inference.colocated else None
        )
        self.heartbeat: ServerHeartbeat | None = None
        """Of the server that was started last."""

    async def run(self, stop: asyncio.Event, *, max_restarts: int, start_seconds: float) -> None:
        """Supervise the server until `stop` is set.

        Args:
            stop: set to end the server.
            max_restarts: how many times in a row a server that died or hung is restarted.
            start_seconds: timeout for a server's start, including loading.
        """
        async with Supervisor() as children:
            process = self._process(children)
            with process or nullcontext():
                num_deaths = num_crashes = 0
                while True:
                    started = time.monotonic()
                    if self._device is not None:
                        await self._device.until_free(stop)
                    heartbeat = self.heartbeat = await self._start(process, start_seconds)
                    async with SGLangClient.of(heartbeat.url, self._inference) as client:
                        end = await self._serve_until_end(
                            heartbeat, client, process, stop, start_seconds
                        )
                    await heartbeat.deregister(end.reason if end else "stopped")
                    if end is None:
                        return
                    if time.monotonic() - started > FORGIVEN_AFTER_SECONDS:
                        num_deaths = num_crashes = 0
                    is_crash = end.is_death and heartbeat.is_registered
                    num_crashes += is_crash
                    num_deaths += not is_crash
                    logger.warning("server %s %s; restarting it", heartbeat.url, end.reason)
                    if process is not None:
                        await process.discard()
                    if num_deaths > max_restarts or num_crashes > MAX_CRASHES:
                        raise InferenceError(
                            f"the server on {heartbeat.url} failed {num_deaths + num_crashes} "
                            f"times; the last time it {end.reason}; see its log "
                            f"{self._plan.log_prefix}*.log"
                        )

    def _process(self, children: Supervisor) -> ServerProcess | None:
        if self._plan.url is not None:
            return None
        return ServerProcess(
            children,
            inference=self._inference,
            model=self._model,
            log_prefix=self._plan.log_prefix,
            seed=self._plan.seed,
        )

    async def _start(self, process: ServerProcess | None, start_seconds: float) -> ServerHeartbeat:
        """Start the server with the newest published weights, unless it runs elsewhere."""
        if process is None:
            service_id = url = (self._plan.url or "").rstrip("/")
        else:
            path, version = self._plan.model_path, 0
            policy = await latest_files(self._store, start_seconds)
            # An adapter is loaded once the server is up with its base model.
            if policy is not None and policy.adapter is None:
                path, version = Path(policy.path), policy.version
            port = await process.start(path, version)
            service_id = f"{socket.gethostname()}:{port}"
            url = http_address(self._inference.inference_host, port)
        return ServerHeartbeat(
            self._store,
            service_id,
            url,
            inference=self._inference,
            publish=self._publish,
            device=self._device,
            is_own=process is not None,
        )

    async def _serve_until_end(
        self,
        heartbeat: ServerHeartbeat,
        client: SGLangClient,
        process: ServerProcess | None,
        stop: asyncio.Event,
        start_seconds: float,
    ) -> _End | None:
        """Serve until `stop` is set (None), or until the process has died or is unusable."""

        async def serve() -> None:
            logger.info("waiting for the server on %s", heartbeat.url)
            deadline = time.monotonic() + start_seconds
            while not heartbeat.is_registered:
                await _until_healthy(client, process, start_seconds)
                if self._device is not None:
                    # The trainer may have acquired the device while the server started.
                    await self._device.until_free(stop)
                    self._device.reset()
                try:
                    await heartbeat.register(client, str(self._plan.model_path))
                except ServerUnreachable as error:
                    # The network, or the server died, which `died` tells.
                    if time.monotonic() > deadline:
                        raise
                    logger.warning("server %s is not up yet: %s", heartbeat.url, error)
                    await asyncio.sleep(BEAT_SECONDS)
            await heartbeat.beat(client)

        died = asyncio.create_task(process.wait()) if process else asyncio.Future[int]()
        stopped = asyncio.create_task(stop.wait())
        serving = asyncio.create_task(serve())
        try:
            events: set[asyncio.Future[Any]] = {died, stopped, serving}
            done, _ = await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks([serving])
            if serving in done and not isinstance(serving.exception(), ServerUnusable):
                serving.result()  # raises, since `serve` ends only with an error
            if stopped in done:
                return None
            if died in done:
                moment = "while it was serving" if heartbeat.is_registered else "during startup"
                return _End(f"{ending(died.result())} {moment}", is_death=True)
            return _End(f"became unusable: {serving.exception()}")
        finally:
            died.cancel()
            stopped.cancel()


async def _until_healthy(
    client: SGLangClient, process: ServerProcess | None, start_seconds: float
) -> None:
    """Wait until the server is healthy. No request is sent while another process has its port."""
    deadline = time.monotonic() + start_seconds
    while True:
        is_own = process is None or await asyncio.to_thread(process.is_listening)
        if is_own and await client.health():
            return
        if time.monotonic() > deadline:
            hint = "check that it runs there" if process is None else process.log_tail()
            raise InferenceError(
                f"no healthy server on {client.base_url} after {start_seconds:g} s; {hint}"
            )
        await asyncio.sleep(0.1)


def _with_weight_roots(config: RootConfig, plan: ServerPlan) -> InferenceSection:
    """Return the section with the directories from which servers may load this run's weights."""
    inference = config.inference
    roots = (*inference.weight_roots, config.run.output_path, plan.model_path)
    return inference.model_copy(update={"weight_roots": roots})


def _plans(config: RootConfig) -> list[ServerPlan]:
    run, given_urls = config.run, config.inference.inference_urls
    name = config.model.model_name_or_path
    if not given_urls:
        check_keys(config.inference)
    # Servers that run elsewhere need no weights here, which may be large.
    model_path = Path(name) if given_urls else resolve_model(name)
    urls: tuple[str | None, ...] = given_urls or (None,)
    return [
        ServerPlan(
            url=url,
            model_path=model_path,
            log_prefix=str(run.logs_dir / f"{run.run_name}_engine_"),
            seed=run.seed,
        )
        for url in urls
    ]

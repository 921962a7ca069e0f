"""One inference server under care: started, registered, kept up to date, started again.

A server is `up` in the store only while it answers and serves the current policy, or is being
handed it by the trainer's publisher. One that starts late or comes back starts on the newest
published weights; one that the publisher took out is brought up to date and offered again.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection, RootConfig
from agentrl.errors import InferenceError, ServerRefused, ServerUnusable, StoreError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.supervisor.device_sharing import DeviceSharing
from agentrl.inference.supervisor.server_process import ServerProcess, check_keys
from agentrl.inference.weight_sync.server_operations import (
    ServedPolicy,
    served_policy,
    update_to_policy,
)
from agentrl.inference.weight_sync.version_files import is_of_same_run
from agentrl.models.resolve import resolve_model
from agentrl.runtime.child_processes import Supervisor
from agentrl.runtime.signals import stop_on_signals
from agentrl.schema import InferenceService, Policy, ServerLoad, ServiceStatus
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_SECONDS = 1.0
FORGIVEN_AFTER_SECONDS = 600.0
"""A server that lived this long may die as often as a new one."""
PROBES_PER_HANG = 3
"""A server is asked this often before the time is over after which it counts as hung."""
MISSED_UPDATE_SECONDS = 3.0
"""An `up` server that is behind for this long was missed by the publisher (it registered while a
version went out); the publisher itself marks its servers `updating` within milliseconds."""


@dataclass(frozen=True)
class ServerPlan:
    """Which server is kept."""

    url: str | None
    """Address of a server that somebody else runs; None for one that is started here."""
    model_path: Path
    """Weights of version 0; of a server that somebody else runs, just their name."""
    log_prefix: str
    """Path of the log file up to the port in its name."""
    seed: int


@dataclass(frozen=True)
class _Address:
    service_id: str
    url: str


class ServerSupervisor:
    """Keeps one server; `run` returns when told to stop or when the server cannot be had."""

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
        self._address = _Address("", "")
        self._registered = False
        self._behind_since: float | None = None
        self._answered_at = 0.0
        self._adapter: str | None = None
        """The newest adapter that the server was seen with."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._load: ServerLoad | None = None
        self._share = (
            DeviceSharing(store, self._latest_files, publish.publish_timeout_seconds)
            if inference.colocated
            else None
        )

    async def run(self, stop: asyncio.Event, *, max_restarts: int, start_seconds: float) -> None:
        """Keep the server until `stop` is set.

        Args:
            stop: set by whoever wants the server ended.
            max_restarts: how often in a row a server that died or hung is started again.
            start_seconds: bound on a server's start, loading included.

        Raises:
            ConfigError: no port is free for it.
            InferenceError: the server did not start, or died too often.
        """
        async with Supervisor() as supervisor:
            engine = self._engine(supervisor)
            with engine or nullcontext():
                num_deaths = 0
                while num_deaths <= max_restarts:
                    started = time.monotonic()
                    if self._share is not None:
                        await self._share.until_device_is_free(stop)
                    self._address = await self._start(engine, start_seconds)
                    async with self._client() as client:
                        died = await self._live(client, engine, stop, start_seconds)
                    if not died:
                        break
                    await self._set_status("down", error="the server process ended")
                    self._registered = False
                    if time.monotonic() - started > FORGIVEN_AFTER_SECONDS:
                        num_deaths = 0
                    num_deaths += 1
                    logger.warning("server %s ended; start %d", self._address.url, num_deaths + 1)
                    if engine is not None:
                        await engine.discard()
                else:
                    raise InferenceError(
                        f"the server on {self._address.url} died {num_deaths} times; "
                        f"see its log {self._plan.log_prefix}*.log"
                    )
                await self._set_status("down", error="stopped")

    def _engine(self, supervisor: Supervisor) -> ServerProcess | None:
        if self._plan.url is not None:
            return None
        return ServerProcess(
            supervisor,
            inference=self._inference,
            model=self._model,
            log_prefix=self._plan.log_prefix,
            seed=self._plan.seed,
        )

    async def _start(self, engine: ServerProcess | None, start_seconds: float) -> _Address:
        if engine is None:
            url = (self._plan.url or "").rstrip("/")
            return _Address(url, url)
        policy = await self._latest_files(start_seconds)
        # An adapter is loaded once the server is up, beside the model that it belongs to.
        path, version = (
            (Path(policy.path), policy.version)
            if policy and policy.adapter is None
            else (self._plan.model_path, 0)
        )
        port = await engine.start(path, version)
        return _Address(
            f"{socket.gethostname()}:{port}", f"http://{self._inference.inference_host}:{port}"
        )

    def _client(self) -> SGLangClient:
        key, admin = self._inference.inference_api_key, self._inference.inference_admin_key
        return SGLangClient(
            self._address.url,
            api_key=key,
            admin_key=admin,
        )

    async def _live(
        self,
        client: SGLangClient,
        engine: ServerProcess | None,
        stop: asyncio.Event,
        start_seconds: float,
    ) -> bool:
        """Serve until told to stop (False) or until the server process died or hangs (True)."""
        died = asyncio.create_task(engine.wait()) if engine else asyncio.Future[int]()
        stopped = asyncio.create_task(stop.wait())
        try:
            caring = asyncio.create_task(self._care(client, engine, stop, start_seconds))
            events: set[asyncio.Future[Any]] = {died, stopped, caring}
            done, _ = await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            caring.cancel()
            await asyncio.wait({caring})
            if caring in done and not isinstance(caring.exception(), ServerUnusable):
                caring.result()  # it only ever ends with an error
            return stopped not in done
        finally:
            died.cancel()
            stopped.cancel()
            for retiring in self._retiring:
                retiring.cancel()

    async def _care(
        self,
        client: SGLangClient,
        engine: ServerProcess | None,
        stop: asyncio.Event,
        start_seconds: float,
    ) -> None:
        await self._until_healthy(client, engine, start_seconds)
        if self._share is not None:
            # The trainer may have taken the device while the server started.
            await self._share.until_device_is_free(stop)
            self._share.start_anew()
        found = await self._catch_up(client)
        await self._store.services.register(
            InferenceService(
                id=self._address.service_id,
                base_url=self._address.url,
                backend=self._inference.inference_backend,
                model_path=str(self._plan.model_path),
                status="up",
                policy_version=found.version,
                adapter=found.adapter,
            )
        )
        self._registered = True
        self._answered_at = time.monotonic()
        logger.info("server %s is up", self._address.url)
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await self._beat(client, is_own=engine is not None)
            except StoreError as error:
                logger.warning("heartbeat put off: %s", error)

    async def _beat(self, client: SGLangClient, *, is_own: bool) -> None:
        service = await self._store.services.heartbeat(self._address.service_id, load=self._load)
        self._load = None
        policy = await self._store.policies.latest()
        try:
            found = await self._in_time(served_policy(client, policy))
            if service.status == "up":  # what a paused server says of its load is of before
                self._load = await self._load_of(client)
        except InferenceError as error:
            await self._bear_silence(service, error, is_own=is_own)
            return
        self._answered_at = time.monotonic()
        if self._share is not None and not await self._share.is_awake(client, service):
            return
        try:
            if self._was_missed(service, found, policy):
                found = await self._catch_up(client)
            if service.status == "down":
                # Whoever took it out may have left it paused.
                await client.continue_()
            if service.status == "down" or service.policy_version != found.version:
                await self._set_status("up", served=found)
            await self._retire_adapters(client, found)
        except InferenceError as error:
            if service.status == "up":
                logger.warning("server %s is taken out: %s", self._address.url, error)
                await self._take_out(service, error)

    async def _take_out(self, service: InferenceService, error: InferenceError) -> None:
        await self._set_status("down", error=str(error))
        if self._share is not None and service.status == "up":
            self._share.note_taken_out()

    async def _bear_silence(
        self, service: InferenceService, error: InferenceError, *, is_own: bool
    ) -> None:
        """Take a silent server out.

        Raises:
            ServerUnusable: it is an own one, and has been silent for too long.
        """
        silent_seconds = time.monotonic() - self._answered_at
        logger.warning("server %s does not answer: %s", self._address.url, error)
        # One that sleeps gets no work anyway, and is still the trainer's to wake.
        if service.status not in ("down", "asleep"):
            await self._take_out(service, error)
        if is_own and silent_seconds > self._inference.server_hang_seconds:
            raise ServerUnusable(f"silent for {silent_seconds:.0f} s")

    def _was_missed(
        self, service: InferenceService, found: ServedPolicy, policy: Policy | None
    ) -> bool:
        """Whether this keeper, and not the publisher, has to bring the server up to date."""
        if policy is None or found.is_policy(policy):
            self._behind_since = None
            return False
        if service.status == "down":
            return True
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        patience = (
            MISSED_UPDATE_SECONDS
            if service.status == "up"
            else self._publish.publish_timeout_seconds + MISSED_UPDATE_SECONDS
        )
        return now - self._behind_since > patience

    async def _catch_up(self, client: SGLangClient) -> ServedPolicy:
        """Bring the server to the latest version, where there is one; return what it serves."""
        policy = await self._latest_files(self._publish.publish_timeout_seconds)
        found = await self._in_time(served_policy(client, policy))
        if policy is None or found.is_policy(policy):
            return found
        await update_to_policy(client, policy, self._publish)
        self._behind_since = None
        return ServedPolicy(policy.version, policy.adapter)

    async def _retire_adapters(self, client: SGLangClient, found: ServedPolicy) -> None:
        """Unload what is older than the adapter before the newest.

        Samplers that have not heard of the newest yet ask for the one before. The server itself
        waits for what is being generated, which nobody here waits for.
        """
        if found.adapter is None or found.adapter == self._adapter:
            return
        kept = {found.adapter, self._adapter}
        self._adapter = found.adapter
        for name in await client.adapters():
            if name not in kept and is_of_same_run(name, found.adapter):
                retiring = asyncio.create_task(self._unload(client, name))
                self._retiring.add(retiring)
                retiring.add_done_callback(self._retiring.discard)

    async def _unload(self, client: SGLangClient, name: str) -> None:
        try:
            await client.unload_adapter(name)
        except InferenceError as error:
            logger.warning("server %s keeps adapter %s: %s", self._address.url, name, error)

    async def _latest_files(self, seconds: float) -> Policy | None:
        """Return the latest version as soon as its files are there; they stay for so long.

        Raises:
            InferenceError: they did not come: the trainer that broadcast the version is gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            policy = await self._store.policies.hold_latest(seconds)
            if policy is None or policy.is_written:
                return policy
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"version {policy.version} was not written within {seconds:g} s; it is "
                    "published again when the trainer is back"
                )
            await asyncio.sleep(0.1)

    async def _until_healthy(
        self, client: SGLangClient, engine: ServerProcess | None, start_seconds: float
    ) -> None:
        """Wait for the server; nothing is asked of what listens there and is not the own child."""
        deadline = time.monotonic() + start_seconds
        while True:
            is_own = engine is None or await asyncio.to_thread(engine.is_listening)
            if is_own and await client.health():
                return
            if time.monotonic() > deadline:
                tail = engine.log_tail() if engine else ""
                raise InferenceError(
                    f"no healthy server on {self._address.url} after {start_seconds:g} s "
                    f"{tail}".strip()
                )
            await asyncio.sleep(0.1)

    async def _load_of(self, client: SGLangClient) -> ServerLoad | None:
        """Return how busy the server is; None where it does not tell, as a gateway may not."""
        try:
            return await self._in_time(client.loads())
        except ServerRefused:
            return None

    async def _in_time(self, answer: Awaitable[T]) -> T:
        patience = self._inference.server_hang_seconds / PROBES_PER_HANG
        try:
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            raise InferenceError(f"no answer within {patience:g} s") from None

    async def _set_status(
        self, status: ServiceStatus, *, error: str | None = None, served: ServedPolicy | None = None
    ) -> None:
        if self._registered:
            await self._store.services.set_status(
                self._address.service_id,
                status=status,
                error=error,
                policy_version=served.version if served else None,
                adapter=served.adapter if served else None,
            )


MAX_RESTARTS = 5
START_SECONDS = {"embedded": 120.0, "sglang": 1800.0}


async def run_server(config: RootConfig, uri: str) -> None:
    """Keep this process's servers until SIGTERM or SIGINT; a second one ends the process at once.

    Raises:
        ConfigError: the model is not there, no port is free, or a key is missing.
        InferenceError: a server did not start, or died too often.
        StoreError: the store is unreachable.
    """
    stop = stop_on_signals("the server is ended first")
    plans = _plans(config)
    async with TrajectoryStore.connect(uri, database=config.run.run_name) as store:
        keepers = [
            ServerSupervisor(
                store,
                plan,
                model=config.model,
                inference=config.inference,
                publish=config.publish,
            )
            for plan in plans
        ]
        async with asyncio.TaskGroup() as group:
            for keeper in keepers:
                group.create_task(
                    keeper.run(
                        stop,
                        max_restarts=MAX_RESTARTS,
                        start_seconds=START_SECONDS[config.inference.inference_backend],
                    )
                )


def _plans(config: RootConfig) -> list[ServerPlan]:
    run, given = config.run, config.inference.inference_urls
    name = config.model.model_name_or_path
    if not given:
        check_keys(config.inference)
    # Who only watches servers needs no weights, which may be large and not here.
    model_path = Path(name) if given else resolve_model(name)
    urls: tuple[str | None, ...] = given or (None,)
    return [
        ServerPlan(
            url=url,
            model_path=model_path,
            log_prefix=str(run.logs_dir / f"{run.run_name}_engine_"),
            seed=run.seed,
        )
        for url in urls
    ]

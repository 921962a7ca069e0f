"""The runs that can be inspected, and a store for each of them.

Input: the configuration of a command, which names a database or a folder. Output: names of runs and
open stores. A private mongod that serves a run is used; otherwise one is started on its data, and
stopped after a while without requests, so that the run can be resumed.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import StoreError
from agentrl.store import TrajectoryStore
from agentrl.store.mongod_folder import running_port
from agentrl.store.private_mongod import EmbeddedMongo, running_uri

IDLE_SECONDS = 30.0
"""A mongod that was started for reading stops this long after the last request."""
MAX_STARTED = 4
"""Maximum number of mongods started for reading at the same time."""


@dataclass
class _OpenRun:
    store: TrajectoryStore
    stack: AsyncExitStack
    port: int | None
    """Port of the private mongod; None for the user's own database."""
    is_ours: bool
    """Whether the mongod was started here."""
    used_at: float = field(default_factory=time.monotonic)
    num_users: int = 0


class RunSources:
    """Opens runs on demand, and closes them when they are no longer requested."""

    def __init__(self, config: RootConfig, *, may_write: bool = False) -> None:
        """Store the location of the runs."""
        given = config.store.db_connection_string
        self._uri = None if given is None else given.get_secret_value()
        self._single_data_dir = (
            config.private_mongo_dir if config.store.mongo_data_dir is not None else None
        )
        self._single_run_name = config.run.run_name
        self._single_output = config.run.output_path
        self._may_write = may_write
        self._open: dict[str, _OpenRun] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    @property
    def place(self) -> str:
        """The location of the runs as text, without a password."""
        if self._uri is not None:
            return self._uri.partition("://")[2].rpartition("@")[2].partition("/")[0]
        return str(self._single_data_dir or PRIVATE_MONGO_ROOT)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to find the same runs."""
        environment = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
        return environment if self._uri is None else {**environment, "MONGODB_URI": self._uri}

    async def names(self) -> list[str]:
        """Return the names of all runs."""
        if self._uri is not None:
            async with TrajectoryStore.connect(self._uri, "agentrl") as server:
                return await server.reports.run_names()
        if self._single_data_dir is not None:
            return [self._single_run_name]
        return sorted(path.name for path in PRIVATE_MONGO_ROOT.glob("*/"))

    def config_path(self, name: str) -> Path:
        """Return where this installation keeps a run's configuration.

        The run's documents are not asked, which others may have written.
        """
        own = self._single_output if name == self._single_run_name else Path("output", name)
        return own / "config.yaml"

    def is_served(self, name: str) -> bool:
        """Return whether the run can be read without starting a mongod."""
        return self._uri is not None or running_port(self._data_dir(name)) is not None

    @asynccontextmanager
    async def opened(self, name: str) -> AsyncIterator[TrajectoryStore]:
        """Yield the store of a run, which stays open for the next request."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            run = self._open.get(name)
            if run is not None and run.port not in (None, running_port(self._data_dir(name))):
                await self._close(name)  # its mongod ended with its run
                run = None
            if run is None:
                run = self._open[name] = await self._open_run(name)
        run.num_users += 1
        try:
            yield run.store
        finally:
            run.num_users -= 1
            run.used_at = time.monotonic()

    async def close_idle(self) -> None:
        """Close unused runs until cancelled."""
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            idle = [
                name
                for name, run in self._open.items()
                if run.is_ours and not run.num_users and now - run.used_at > IDLE_SECONDS
            ]
            for name in idle:
                await self._close(name)

    async def close(self) -> None:
        """Close everything."""
        for name in list(self._open):
            await self._close(name)

    def _data_dir(self, name: str) -> Path:
        return self._single_data_dir or PRIVATE_MONGO_ROOT / name

    async def _open_run(self, name: str) -> _OpenRun:
        if name not in await self.names():
            raise StoreError(f"no run {name!r} at {self.place}")
        async with AsyncExitStack() as stack:
            port, is_ours = None, False
            if self._uri is None:
                mongo, is_ours = await self._mongod(name, stack)
                port = mongo.port
                uri = mongo.uri() if self._may_write else await asyncio.to_thread(mongo.reader_uri)
            else:
                uri = self._uri
            store = await stack.enter_async_context(TrajectoryStore.connect(uri, name))
            if await store.runs.get() is None:
                raise StoreError(f"{self.place} contains no run {name!r} yet")
            return _OpenRun(store, stack.pop_all(), port, is_ours)

    async def _mongod(self, name: str, stack: AsyncExitStack) -> tuple[EmbeddedMongo, bool]:
        data_dir = self._data_dir(name)
        if await asyncio.to_thread(running_uri, data_dir) is not None:
            return EmbeddedMongo(data_dir, running_port(data_dir) or 0), False
        await self._close_least_recently_used()
        mongo = EmbeddedMongo(data_dir)
        stack.push_async_callback(asyncio.to_thread, mongo.stop)
        await mongo.start_beside()
        return mongo, True

    async def _close_least_recently_used(self) -> None:
        unused = [
            (run.used_at, name)
            for name, run in self._open.items()
            if run.is_ours and not run.num_users
        ]
        started = sum(run.is_ours for run in self._open.values())
        for _, name in sorted(unused)[: max(0, started - MAX_STARTED + 1)]:
            await self._close(name)

    async def _close(self, name: str) -> None:
        await self._open.pop(name).stack.aclose()

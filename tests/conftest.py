"""Fixtures for all rooms: one real mongod a session, one database a test."""

import gc
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.loop_watchdog import LoopWatchdog

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was imported, which lives as long as the session."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, left as it was found: commands that tests call in this process set it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty, of a user whose environment names no database and no GPU."""
    monkeypatch.chdir(tmp_path)
    for name in ("MONGODB_URI", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMongo]:
    """A real mongod for the whole session; `mongod.uri("name")` is a connection string."""
    with EmbeddedMongo(tmp_path_factory.mktemp("mongod")) as mongo:
        yield mongo


@pytest.fixture
def mongo_uri(mongod: EmbeddedMongo) -> str:
    """Connection string of a database that no other test uses (not dropped by itself)."""
    return mongod.uri(f"test_{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def store(mongo_uri: str) -> AsyncIterator[TrajectoryStore]:
    """An empty, prepared store in a database of its own, dropped afterwards."""
    async with TrajectoryStore.connect(mongo_uri) as connected:
        await connected.ensure_schema()
        yield connected
        await connected.drop_database()


_WATCHED = {"inference", "rewards", "rollout", "runtime", "tools"}
"""Rooms whose code shares an event loop with many rollouts or clients; the trainer's does not."""


@pytest.fixture(autouse=True)
def _loop_watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test in which AgentRL's code keeps the event loop for too long."""
    if not (inspect.iscoroutinefunction(request.function) and _WATCHED & {*request.path.parts}):
        yield
        return
    watchdog = LoopWatchdog()
    with watchdog.watching():
        yield
    assert not watchdog.stalls, "\n".join(watchdog.stalls)

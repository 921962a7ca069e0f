"""Fixtures for all packages: one real mongod per session, one database per test."""

import gc
import inspect
import logging
import os
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fuzz.asked import num_cases_of, report
from harness.loop_watchdog import LoopWatchdog
from hypothesis import settings
from support.fuzzing import TryCases

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

gc.disable()
# As `agentrl` sets it, before anything loads torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background commands with SIGINT ignored, and nohup with SIGHUP ignored, which child
# processes inherit.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)

# The suite tries the same cases each time; `scripts/fuzz`, which wants a report, tries new ones.
settings.register_profile("suite", derandomize=report() is None)
settings.load_profile("suite")

_LONGEST = (
    *("test_first_answers", "test_compilation", "test_commands"),
    *("test_short_demo", "test_environment", "test_server_supervisor", "test_sampler_process"),
    *("test_inspector_pages", "test_recording", "test_mesh", "test_adapters", "test_train_process"),
    *("test_rehearsal", "test_server_clock", "test_sampling_loop", "test_mcp_toolbox"),
    *("test_random_trees", "test_bring_your_own", "test_agent_frameworks", "test_inspect_commands"),
    *("test_hostile_text", "test_trackers", "test_records", "test_worker_pool", "test_resume"),
)
"""Files that take longest, in any package."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process is alone with one of them at the end.

    Tests of random cases get the time that more of them than the suite's take.
    """
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if (mark := item.get_closest_marker("fuzz")) is not None:
            item.add_marker(pytest.mark.timeout(max(120, num_cases_of(*mark.args))))


def pytest_collection_finish() -> None:
    """Begin to collect garbage, but not what was imported, which lives as long as the session."""
    gc.freeze()
    gc.enable()


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
    with ExitStack() as folders:
        if _has_room_in_memory():
            folder = Path(folders.enter_context(TemporaryDirectory(dir=_IN_MEMORY)))
        else:
            folder = tmp_path_factory.mktemp("mongod")
        with EmbeddedMongo(folder) as mongo:
            yield mongo


_IN_MEMORY = Path("/dev/shm")
_LEAST_ROOM_BYTES = 4 << 30


def _has_room_in_memory() -> bool:
    """Whether a database fits into memory, where making and dropping hundreds of them costs half."""
    return _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free >= _LEAST_ROOM_BYTES


@dataclass
class Databases:
    """Those of earlier tests: to empty one costs a tenth of making one."""

    used: list[str] = field(default_factory=list)
    shape: dict[str, Any] | None = None
    """Of a prepared one that no test has changed."""


@pytest.fixture(scope="session")
def databases() -> Databases:
    """The databases that tests of this session have left."""
    return Databases()


@pytest.fixture
def mongo_uri(request: pytest.FixtureRequest, mongod: EmbeddedMongo, databases: Databases) -> str:
    """Connection string of a database that no other test uses meanwhile (not dropped by itself)."""
    if "store" in request.fixturenames and databases.used:
        return mongod.uri(databases.used.pop(0))
    return mongod.uri(f"test_{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def store(mongo_uri: str, databases: Databases) -> AsyncIterator[TrajectoryStore]:
    """An empty, prepared store in a database of its own."""
    async with TrajectoryStore.connect(mongo_uri) as connected:
        if databases.shape is None or not await _emptied(connected, databases.shape):
            await connected.drop_database()
            await connected.ensure_schema()
            databases.shape = databases.shape or await _shape(connected)
        yield connected
        # The rest goes before the next use; a run of another release would keep it from connecting.
        await connected.database.runs.delete_many({})
        databases.used.append(connected.database_name)


async def _emptied(store: TrajectoryStore, shape: Mapping[str, Any]) -> bool:
    """Take everything away that a test left; False where what remains is not as it was prepared."""
    handle = store.database.handle
    for name in await store.database.collections(type="collection"):
        if name.startswith("system."):
            continue
        if name in shape:
            await handle[name].delete_many({})
        else:
            await handle.drop_collection(name)
    return await _shape(store) == shape


async def _shape(store: TrajectoryStore) -> dict[str, Any]:
    """Return a database's collections and views with their options, and the number of indexes."""
    stats = await store.database.handle.command("dbStats")
    return {"indexes": stats["indexes"], **await store.database.collections()}


_WATCHED = {"inference", "rewards", "rollout", "runtime", "tools"}
"""Packages whose code shares an event loop with many rollouts or clients; the trainer's does not."""


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


@pytest.fixture
def try_cases(request: pytest.FixtureRequest) -> TryCases:
    """Tries a test marked `fuzz` with random cases; see `support.fuzzing`."""
    mark = request.node.get_closest_marker("fuzz")
    return TryCases(request.node.nodeid, *mark.args)

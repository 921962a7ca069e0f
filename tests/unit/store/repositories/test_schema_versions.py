import pytest

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import SCHEMA_VERSION, InferenceService, Run, SamplerInfo
from agentrl.store import TrajectoryStore
from agentrl.store.database import RunDatabase
from agentrl.store.repositories import schema_versions
from agentrl.store.repositories.schema_versions import Migration
from agentrl.trainer.trainer_lease import migrate_run

NEXT = SCHEMA_VERSION + 1


async def add_mark(database: RunDatabase) -> None:
    await database.runs.update_many({}, {"$inc": {"mark": 1}})


@pytest.fixture
async def run_store(store: TrajectoryStore) -> TrajectoryStore:
    await store.runs.create(Run(name=store.database_name))
    return store


def become_next(monkeypatch: pytest.MonkeyPatch, *, readable_since: int) -> None:
    """Make this process one of a later release, whose schema has a migration."""
    monkeypatch.setattr(schema_versions, "SCHEMA_VERSION", NEXT)
    migrations = {SCHEMA_VERSION: Migration(add_mark, readable_since)}
    monkeypatch.setattr(schema_versions, "MIGRATIONS", migrations)


async def migrate(store: TrajectoryStore) -> None:
    await migrate_run(store, lease_seconds=5)


async def test_a_later_trainer_migrates_once_and_earlier_processes_go_on(
    run_store: TrajectoryStore,
) -> None:
    await run_store.samplers.register(SamplerInfo(id="elsewhere:1:0-a", host="h", pid=1))
    with pytest.MonkeyPatch.context() as later:
        become_next(later, readable_since=SCHEMA_VERSION)
        assert not await run_store.schema.check_joinable()
        for _ in range(2):
            await migrate(run_store)
        assert await run_store.schema.check_joinable()
    run = await run_store.database.runs.find_one() or {}
    assert (run["schema_version"], run["readable_since"], run["mark"]) == (NEXT, SCHEMA_VERSION, 1)
    assert not await run_store.schema.check_joinable()
    await run_store.ensure_schema()
    async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name) as earlier:
        assert await earlier.runs.get() is not None


async def test_schemas_that_cannot_be_mixed_are_refused_by_name(
    run_store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as later:
        become_next(later, readable_since=NEXT)
        with pytest.raises(StoreError, match="start its trainer with this release first"):
            await run_store.schema.check_joinable()
        await run_store.samplers.register(SamplerInfo(id="elsewhere:1:0-a", host="h", pid=1))
        with pytest.raises(
            StoreError, match=r"sampler elsewhere:1:0-a has been active .* stop them"
        ):
            await migrate(run_store)
        run = await run_store.database.runs.find_one() or {}
        assert "mark" not in run
        await run_store.database.samplers.delete_many({})
        await migrate(run_store)
    monkeypatch.setattr(schema_versions, "MIGRATIONS", {})
    refusal = (
        rf"has schema version {NEXT}, .* written by AgentRL .*, a later release; use that release"
    )
    with pytest.raises(StoreError, match=refusal):
        await run_store.schema.check_joinable()
    with pytest.raises(StoreError, match=refusal):
        async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name):
            pass


async def test_a_migration_that_was_interrupted_is_repeated_by_the_next_trainer(
    run_store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next(monkeypatch, readable_since=SCHEMA_VERSION)

    async def interrupted(database: RunDatabase) -> None:
        await add_mark(database)
        await database.runs.update_many({}, {"$inc": {"trainer_leases.trainer.fence": 1}})

    migrations = {SCHEMA_VERSION: Migration(interrupted, SCHEMA_VERSION)}
    monkeypatch.setattr(schema_versions, "MIGRATIONS", migrations)
    with pytest.raises(LeaseLost):
        await migrate(run_store)
    assert not await run_store.schema.check_joinable()
    await run_store.database.runs.update_one(
        {},
        {"$set": {"trainer_leases.trainer.expires_at": (await run_store.database.server_time())}},
    )
    become_next(monkeypatch, readable_since=SCHEMA_VERSION)
    await migrate(run_store)
    assert await run_store.schema.check_joinable()


async def test_processes_of_different_releases_are_named(run_store: TrajectoryStore) -> None:
    await run_store.samplers.register(
        SamplerInfo(id="elsewhere:1:0-a", host="h", pid=1, release="1.0")
    )
    service = InferenceService(
        id="s", base_url="http://s", backend="embedded", model_path="m", release="1.0"
    )
    await run_store.services.register(service)
    assert (await run_store.reports.processes()).mixed_releases == ""
    await run_store.trainer_leases.acquire("trainer", "elsewhere:2:0-b", 60)
    warning = (await run_store.reports.processes()).mixed_releases
    assert "trainer elsewhere:2:0-b; 1.0: sampler elsewhere:1:0-a, inference server s" in warning

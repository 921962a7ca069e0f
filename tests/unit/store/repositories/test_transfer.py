"""A run goes to files and comes back the same, to the byte."""

import asyncio
import hashlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bson
import pytest
from support.stored import claim, fill, make_task, make_turn, play, wrong_counts

from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.ports import free_port
from agentrl.schema import (
    Fork,
    InferenceService,
    Policy,
    Record,
    Run,
    SamplerInfo,
    ToolCall,
    ToolResult,
    TurnTraining,
)
from agentrl.schema.image import Image
from agentrl.store import TrajectoryStore
from agentrl.store.documents.export_files import read_documents
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod
from agentrl.store.repositories.forks import new_fork_id


@pytest.fixture
async def empty(mongod: EmbeddedMongo, mongo_uri: str) -> AsyncIterator[TrajectoryStore]:
    """Another database on the same server."""
    name = mongo_uri.partition("?")[0].rpartition("/")[2] + "_copy"
    async with TrajectoryStore.connect(mongod.uri(), name) as store:
        yield store
        await store.drop_database()


@pytest.fixture
async def plain_mongod(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URI of a server without a replica set, which offers no snapshots."""
    folder, port = tmp_path_factory.mktemp("plain"), free_port()
    command = [str(find_mongod()), "--dbpath", str(folder), "--port", str(port)]
    command += ["--bind_ip", "127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB", "0.25"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    uri = f"mongodb://127.0.0.1:{port}/?serverSelectionTimeoutMS=20000"
    try:
        async with TrajectoryStore.connect(uri, "any", server_selection_timeout=20):
            yield uri
    finally:
        process.kill()
        process.wait(timeout=60)


async def fill_run(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, config={"pi": 3.25, "n": 2**40}))
    await fill(store, 2, num_turns=3)
    await store.tasks.add([make_task(7, num_generations=1)])
    record = await claim(store)
    of_a_database = {"$match": {"$$x": [{"$oid": "no"}]}, "at": {"$ref": "users", "$id": 1}}
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"a": deep}
    call = ToolCall(
        id="c",
        name="f",
        arguments={
            "text": "ä\u2028\ud800",
            "none": None,
            "x": 0.1,
            "large": 2**70,
            "nan": float("nan"),
            "query": of_a_database,
            "$set": {"$date": 1},
            "deep": deep,
        },
    )
    # Arrays of this size are kept in blobs of several parts.
    turn = make_turn(record, 0, tool_calls=[call], num_added=2_500_000, num_output=300_000)
    await store.turns.append(turn, record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    await store.ledger.reserve("trainer", ["train/0/q0/0"], 1)
    for version in (1, 2):
        await store.policies.publish(Policy(version=version, path="weights", num_bytes=2**40))
    await store.figures.put_step("trainer", {"step": 1, "loss": float("nan"), "tokens": 2**40})
    await store.figures.put_evaluation("trainer", {"version": 1, "scores": {"held_out": 0.5}})
    server = InferenceService(
        id="s", base_url="http://127.0.0.1:1", backend="embedded", model_path="m"
    )
    await store.services.register(server)
    await store.samplers.register(SamplerInfo(id="host:1:2", host="host", pid=1))
    training = TurnTraining(
        id=f"trainer/1/{turn.id}",
        consumer="trainer",
        step=1,
        turn_id=turn.id,
        record_id=record.id,
        task_id=record.task_id,
        num_tokens=7,
        num_trained_tokens=7,
        staleness=0,
    )
    await store.ledger.put_turn_trainings([training])
    (shown,) = await store.images.put([Image(mime_type="image/png", data=b"\0\1")])
    await _fork(store, record.id, shown)


async def _fork(store: TrajectoryStore, parent: str, image: str) -> None:
    fork_id = new_fork_id(parent, 0)
    fork = Fork(id=fork_id, record_id=parent, attempt=1, task_id="train/0/q7", turn=0, version=2)
    await store.forked.ensure_schema()
    await store.audit.add("retry", {"num_added": 2})
    await store.forks.add(fork)
    task = make_task(7, num_generations=1).model_copy(update={"id": fork_id, "images": (image,)})
    await store.forked.tasks.add([task])
    claimed = await store.forked.records.claim(
        "me", lease_seconds=60, admitted_groups=1, max_attempts=1, task_id=fork_id
    )
    assert claimed is not None
    await play(store.forked, claimed[0])


async def raw(store: TrajectoryStore) -> dict[str, list[bytes]]:
    """Every document of the database as BSON; the run's name and what is counted again left out."""
    found: dict[str, list[bytes]] = {}
    names = await store.database.collections(type="collection")
    for name in sorted(names.keys() - {"system.views"}):
        documents = [document async for document in store.database[name].find().sort("_id", 1)]
        if name == "runs":
            own = {"_id": "", "imported_policies": None}
            documents = [{**document, **own} for document in documents]
        found[name] = [bson.encode(document) for document in documents]
    return found


async def test_what_was_exported_comes_back_byte_for_byte(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await fill_run(store)
    manifest = await store.transfer.export_run(tmp_path / "export")
    assert manifest.files["turns"].num_documents == 13
    stored = await raw(store)
    assert all(stored.values()), [name for name, documents in stored.items() if not documents]
    await empty.transfer.import_run(tmp_path / "export")
    assert await wrong_counts(empty) == []
    assert await raw(empty) == stored
    run = await empty.runs.get()
    assert run is not None
    assert run.name == empty.database_name
    (group, _) = await empty.ledger.ready_groups(limit=2)
    (same, _) = await store.ledger.ready_groups(limit=2)
    for turn, original in zip(group[1].turns, same[1].turns, strict=True):
        for field in ("added_ids", "output_ids", "output_logprobs"):
            assert getattr(turn, field).tobytes() == getattr(original, field).tobytes()
    # The copy goes on as the original would.
    await empty.ledger.reserve("trainer", ["train/0/q0/1"], 1)
    await play(empty, await _claim_next(empty))


async def test_an_export_of_an_active_run_shows_one_moment(
    store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 2)
    await store.tasks.add([make_task(7)])
    await claim(store, "other-host:1:2")
    export_collection = store.transfer._export_collection

    async def then_go_on(name: str, *rest: Any) -> Any:
        exported = await export_collection(name, *rest)
        if name == "tasks":
            await store.tasks.add([make_task(8)])
        return exported

    monkeypatch.setattr(store.transfer, "_export_collection", then_go_on)
    manifest = await store.transfer.export_run(tmp_path / "export", everything=True)
    assert (manifest.was_active, manifest.is_snapshot) == (True, True)
    records = read_documents(tmp_path / "export/records.jsonl")
    tasks = read_documents(tmp_path / "export/tasks.jsonl")
    assert {record["task_id"] for record in records} == {task["_id"] for task in tasks}


@pytest.mark.parametrize("is_active", [False, True])
async def test_an_export_says_what_a_server_without_snapshots_gave(
    plain_mongod: str, tmp_path: Path, is_active: bool
) -> None:
    async with TrajectoryStore.connect(plain_mongod, f"plain_{is_active}") as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=store.database_name))
        await fill(store, 1)
        await store.tasks.add([make_task(7)])
        if is_active:
            await claim(store, "other-host:1:2")
        manifest = await store.transfer.export_run(tmp_path / "export")
    assert (manifest.was_active, manifest.is_snapshot) == (is_active, not is_active)


async def test_an_export_of_an_earlier_release_is_still_read(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 1)
    await store.transfer.export_run(folder)
    earlier = json.loads((folder / "manifest.json").read_text())
    del earlier["was_active"], earlier["is_snapshot"]
    for name in [name for name in earlier["files"] if name.startswith("forks")]:
        (folder / earlier["files"].pop(name)["name"]).unlink()
    (folder / "manifest.json").write_text(json.dumps(earlier))
    manifest = await empty.transfer.import_run(folder)
    assert (manifest.was_active, manifest.is_snapshot) == (None, None)
    assert await wrong_counts(empty) == []
    assert len(await empty.records.of_task("train/0/q0")) == 2
    earlier["format"] = "parquet"
    (folder / "manifest.json").write_text(json.dumps(earlier))
    with pytest.raises(ConfigError, match="is an export in 'parquet', which this release does not"):
        await empty.transfer.import_run(folder)


async def test_groups_that_nobody_began_are_left_out_unless_they_are_asked_for(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add(make_task(number) for number in range(500))
    await play(store, await claim(store))
    played = await store.transfer.export_run(tmp_path / "played")
    assert played.num_left_out == 499
    # The other slot of the begun group is there, so that the group can be finished.
    counts = {name: played.files[name].num_documents for name in ("tasks", "records", "turns")}
    assert counts == {"tasks": 1, "records": 2, "turns": 1}
    whole = await store.transfer.export_run(tmp_path / "whole", everything=True)
    assert (whole.num_left_out, whole.files["records"].num_documents) == (0, 1000)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        for name in ("played", "whole")
    ]
    assert sizes[0] * 20 < sizes[1]
    await empty.transfer.import_run(tmp_path / "played")
    record = await play(empty, await claim(empty))
    task = await empty.tasks.get(record.task_id)
    assert task is not None
    assert (record.id, task.status) == ("train/0/q0/1", "completed")
    assert await empty.tasks.add(make_task(number) for number in range(500)) == 499


async def _claim_next(store: TrajectoryStore) -> Record:
    await store.tasks.add([make_task(9)])
    return await claim(store)


async def test_jsonl_is_one_readable_document_a_line(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 1)
    await store.transfer.export_run(tmp_path / "export")
    lines = (tmp_path / "export/records.jsonl").read_text().splitlines()
    assert [json.loads(line)["_id"] for line in lines] == ["train/0/q0/0", "train/0/q0/1"]
    assert json.loads(lines[0])["attempt"] == 1
    assert not any("$number" in line for line in lines)


async def test_mistakes_are_named_and_leave_nothing(
    store: TrajectoryStore,
    empty: TrajectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "export"
    with pytest.raises(StoreError, match="contains no run"):
        await empty.transfer.export_run(folder)
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 1)
    await store.transfer.export_run(folder)
    with pytest.raises(ConfigError, match="already exists"):
        await store.transfer.export_run(folder)
    with pytest.raises(StoreError, match="is not empty; import under another --run_name"):
        await store.transfer.import_run(folder)
    with pytest.raises(ConfigError, match=r"is not an export: it has no manifest\.json"):
        await empty.transfer.import_run(tmp_path.parent / "nothing")
    turns = folder / "turns.jsonl"
    turns.write_bytes(turns.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"turns\.jsonl was changed after the export"):
        await empty.transfer.import_run(folder)
    turns.unlink()
    with pytest.raises(ConfigError, match=r"turns\.jsonl is missing"):
        await empty.transfer.import_run(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"jsonl"', '"csv"'))
    with pytest.raises(
        ConfigError, match="is an export in 'csv', which this release does not read"
    ):
        await empty.transfer.import_run(folder)
    manifest.write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read") as caught:
        await empty.transfer.import_run(folder)
    assert "\n" not in str(caught.value)
    assert await empty.database.handle.list_collection_names() == []


HOSTILE = {
    "code": ('"name": {"$code": "while(true){}"}', "values of type Code are not allowed"),
    "scope": ('"x": {"$code": "f()", "$scope": {}}', "values of type Code are not allowed"),
    "operator": (
        '"x": {"$set": {"status": "completed"}}',
        r"the field name '\$set' is not allowed",
    ),
    "reference": ('"x": {"$ref": "users", "$id": 1}', "values of type DBRef are not allowed"),
    "pattern": (
        '"x": {"$regularExpression": {"pattern": "(a+)+", "options": ""}}',
        "values of type Regex are not allowed",
    ),
    "nested": ('"x": ' + "[" * 250 + "]" * 250, "it is nested deeper than 180 levels"),
    "deep": ('"x": ' + "[" * 100_000 + "]" * 100_000, "cannot be read"),
    "digits": ('"x": ' + "9" * 5_000, "cannot be read"),
    "large": ('"x": [9223372036854775808]', "the integer 9223372036854775808 does not fit"),
    "long": ('"x": {"$numberLong": "-9223372036854775809"}', "does not fit into 64 bits"),
}


HOSTILE_LINES = {
    **{kind: (f'{{"_id": "a", {text}}}', message) for kind, (text, message) in HOSTILE.items()},
    "text": ("no JSON", "cannot be read"),
    "list": ("[1]", "a document must be an object"),
    "id": ('{"_id": [1]}', "a document must be an object with a text or integer _id"),
    "truth": ('{"_id": true}', "a document must be an object with a text or integer _id"),
}


@pytest.mark.parametrize("kind", HOSTILE_LINES)
def test_what_is_no_data_of_a_run_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    line, message = HOSTILE_LINES[kind]
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"_id": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl: document 2: .*{message}") as caught:
        list(read_documents(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fields", "query", "outside", "link"])
async def test_an_import_takes_data_of_a_run_from_its_folder_and_nothing_else(
    empty: TrajectoryStore, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    name = "../outside.jsonl" if kind == "outside" else "tasks.jsonl"
    text = '{"_id": "a", "kind": "mcp"}\n' if kind == "query" else '{"_id": "a"}\n'
    message = {
        "fields": "document rejected: task 'a' has no kind",
        "query": "document rejected: document 'a' is not a valid MCPTask: query",
        "outside": r"tasks is in '\.\./outside\.jsonl'; expected a file tasks\.jsonl",
        "link": r"tasks is in 'tasks\.jsonl'; expected a file",
    }[kind]
    if kind == "link":
        (tmp_path / "elsewhere").write_text(text)
        (folder / name).symlink_to(tmp_path / "elsewhere")
    else:
        (folder / name).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    files = {"tasks": {"name": name, "num_documents": 1, "sha256": digest}}
    manifest = {"run": "r", "schema_version": 2, "format": "jsonl", "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=message) as caught:
        await empty.transfer.import_run(folder)
    assert "\n" not in str(caught.value)
    assert await empty.database.tasks.count_documents({}) == 0


UNUSABLE: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "score": (
        "records",
        lambda record: record["score"].update(value=float("nan")),
        "is not a valid Record: score.value: .*finite",
    ),
    "part": (
        "record_data",
        lambda record: record["score"].update(parts={"a": float("inf")}),
        "is not a valid DBRecordData: score.parts.a: .*finite",
    ),
    "reward": (
        "turns",
        lambda turn: turn.update(reward=float("nan")),
        "turn '.*': reward must be finite, got nan",
    ),
    "seat": (
        "turns",
        lambda turn: turn.update(seat={"name": "a", "reward": float("inf")}),
        "turn '.*': seat.reward must be finite, got inf",
    ),
    "integer": ("turns", lambda turn: turn.update(index=2**63), "the integer .* does not fit"),
    "orders": ("tasks", lambda task: task.update(order=1), "duplicate key .*one_order"),
    "status": (
        "records",
        lambda record: record.update(status="x"),
        "is not a valid Record: status",
    ),
    "form": ("policies", lambda policy: policy.update(_id="one"), "is not a valid Policy: version"),
    "turn": ("turns", lambda turn: turn.update(index="x"), "Document failed validation"),
    "version": ("policies", lambda policy: policy.update(_id=-(2**64)), "does not fit"),
}


@pytest.mark.parametrize(
    ("kind", "is_prepared"), [*((kind, False) for kind in [*UNUSABLE, "no run"]), ("score", True)]
)
async def test_an_import_that_fails_leaves_nothing(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path, kind: str, is_prepared: bool
) -> None:
    folder = tmp_path / "export"
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 2)
    await store.policies.publish(Policy(version=1, path="weights", num_bytes=1))
    await store.transfer.export_run(folder)
    if kind == "no run":
        name, message = "runs", "holds no run"
        (folder / "runs.jsonl").write_text("")
    else:
        name, alter, message = UNUSABLE[kind]
        documents = [
            json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()
        ]
        alter(documents[0])
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(d)}\n" for d in documents))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / f"{name}.jsonl").read_bytes()
    manifest["files"][name]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if is_prepared:
        await empty.ensure_schema()
    before = await empty.database.collections()
    with pytest.raises(ConfigError, match=message) as caught:
        await empty.transfer.import_run(folder)
    assert "\n" not in str(caught.value)
    assert await empty.database.collections() == before
    for collection in await empty.database.collections(type="collection"):
        assert collection == "system.views" or not await empty.database[collection].find_one()


async def test_an_import_that_is_interrupted_leaves_nothing(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 5)
    await store.transfer.export_run(tmp_path / "export")
    importing = asyncio.create_task(empty.transfer.import_run(tmp_path / "export"))
    while await empty.database.tasks.find_one() is None:
        await asyncio.sleep(0)
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    assert await empty.database.collections() == {}


async def test_dates_in_the_future_keep_no_imported_run_alive(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(1)])
    await claim(store)
    await store.trainer_leases.acquire("trainer", "elsewhere:1:2-3", lease_seconds=60)
    await store.samplers.register(SamplerInfo(id="elsewhere:1:2", host="elsewhere", pid=1))
    future = await store.database.server_time() + timedelta(days=3650)
    await store.database.records.update_many(
        {"lease": {"$ne": None}}, {"$set": {"lease.expires_at": future}}
    )
    await store.database.samplers.update_many({}, {"$set": {"heartbeat_at": future}})
    await store.database.runs.update_many(
        {}, {"$set": {"trainer_leases.trainer.expires_at": future}}
    )
    await store.transfer.export_run(folder, everything=True)
    await empty.transfer.import_run(folder)
    now = await empty.database.server_time()
    for name, field in [
        ("records", "lease.expires_at"),
        ("samplers", "heartbeat_at"),
        ("runs", "trainer_leases.trainer.expires_at"),
    ]:
        assert await empty.database[name].find_one({field: {"$lte": now}}) is not None
        assert await empty.database[name].find_one({field: {"$gt": now}}) is None


async def test_a_file_beside_an_export_is_refused(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.transfer.export_run(tmp_path / "export")
    (tmp_path / "export/config.yaml").write_text("scorer_module: theirs.py")
    with pytest.raises(ConfigError, match=r"holds 'config\.yaml', which no export contains"):
        await empty.transfer.import_run(tmp_path / "export")


async def test_files_that_imported_policies_name_are_not_read(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name, imported_policies=()))
    for version in (1, 2, 3):
        await store.policies.publish(Policy(version=version, path="/theirs", num_bytes=1))
    await store.transfer.export_run(tmp_path / "export")
    await empty.transfer.import_run(tmp_path / "export")
    run = await empty.runs.get()
    assert run is not None
    assert run.is_imported
    assert run.imported_policies == (1, 2, 3)
    assert await empty.policies.latest() is None
    assert await empty.policies.hold_latest(60) is None
    assert await empty.policies.all() == []
    await empty.policies.publish(Policy(version=2, path="/ours", num_bytes=1))
    (ours,) = await empty.policies.all()
    assert (ours.path, await empty.policies.latest()) == ("/ours", ours)
    await store.policies.publish(Policy(version=4, path="/ours", num_bytes=1))
    assert len(await store.policies.all()) == 4


async def test_some_groups_come_with_the_images_that_they_show(
    store: TrajectoryStore, empty: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    images = [Image(mime_type="image/png", data=bytes([number])) for number in range(3)]
    shown, answered, other = await store.images.put(images)
    await store.tasks.add([make_task(0, num_generations=1), make_task(1, num_generations=1)])
    for number in range(2):
        record = await claim(store)
        images_of = (answered if number == 0 else other,)
        result = ToolResult(call_id="c", name="f", content="", images=images_of)
        turn = make_turn(record, 0, tool_calls=[ToolCall(id="c", name="f", arguments={})])
        turn = turn.model_copy(update={"added_images": (shown,), "tool_results": (result,)})
        await store.turns.append(turn, record.fence)
    await store.transfer.export_run(tmp_path / "out", groups=["train/0/q0"])
    await empty.transfer.import_run(tmp_path / "out")
    assert await empty.images.get([shown, answered]) == images[:2]
    with pytest.raises(StoreError, match="is missing from the database"):
        await empty.images.get([other])

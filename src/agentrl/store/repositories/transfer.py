"""Export of a run to a folder of files, and import into an empty database.

The folder holds `manifest.json`, with the checksum of each file, and one file per collection
(`documents.export_files`), those of the forks included. Groups that no sampler has started are left
out by default, because a run adds the questions of its file again when it continues.
"""

import asyncio
import functools
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bson.errors import InvalidDocument
from pymongo.errors import ConfigurationError, OperationFailure

from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import SCHEMA_VERSION
from agentrl.schema.base import Value
from agentrl.schema.image import stored_key
from agentrl.store.collections.validators import STORED_MODELS
from agentrl.store.database import FORKS_PREFIX, Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, from_document, task_from_document
from agentrl.store.documents.export_files import read_documents, write_documents
from agentrl.store.documents.packed_turns import blob_key
from agentrl.store.repositories.liveness import live_processes

COLLECTIONS = (
    "tasks",
    "records",
    "turns",
    "record_data",
    "turn_training",
    "steps",
    "evaluations",
    "diffs",
    "policies",
    "inference_services",
    "samplers",
    "blobs",
    "forks",
    "audit",
    *(f"{FORKS_PREFIX}{name}" for name in ("tasks", "records", "turns", "record_data")),
    # Last, so that an interrupted import is recognizable by the missing run.
    "runs",
)
_SLOT_FIELDS = {"tasks": "_id", "records": "task_id"}
"""Collections with slots -> the field that names the task."""
_OF_GROUPS = _SLOT_FIELDS | {"record_data": "task_id"}
_OF_RECORDS = frozenset({"turns", "turn_training"})
"""Collections that an index answers by the id of the task, or of the record."""
_LONGEST_LEASE = timedelta(minutes=5)
"""From when on a lease of an export is not one that was taken just before."""
MANIFEST = "manifest.json"
FORMAT = "jsonl"
BATCH_BYTES = 8 * 2**20


class Manifest(Value):
    """The contents of an export."""

    run: str
    schema_version: int
    format: str
    files: dict[str, "ExportedFile"]
    """Counts by collection."""
    num_left_out: int = 0
    """Number of groups that no sampler had started; 0 for an export of certain groups."""
    was_active: bool | None = None
    """Whether processes worked on the run during the export; None for exports of earlier releases,
    which did not state it."""
    is_snapshot: bool | None = None
    """Whether all files show the run at the same moment: the run was idle, or the server let it be
    read as it was at the start."""


class ExportedFile(Value):
    """One file of an export."""

    name: str
    num_documents: int
    sha256: str


class TransferRepository(Repository):
    """Copies the run out of the database, and into an empty one."""

    def __init__(
        self,
        database: RunDatabase,
        *,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        """Compose the repository.

        Args:
            database: of the run.
            prepare: creates validators and indexes, so that the server refuses what they exclude.
        """
        super().__init__(database)
        self._prepare = prepare

    @operation("export the run", repeatable=False)
    async def export_run(
        self,
        folder: Path,
        *,
        everything: bool = False,
        groups: Collection[str] | None = None,
    ) -> Manifest:
        """Write the run to `folder`, which must not exist yet.

        The files show the run at one moment, even if it is active, where the server supports
        snapshot reads (a replica set since MongoDB 5.0). Elsewhere, documents that a live run adds
        during the export may be in one file and missing in another; the manifest says so.

        Args:
            folder: the folder to create.
            everything: include the groups that no sampler has started.
            groups: ids of the tasks to which the export is limited, with the documents they need.

        Raises:
            ConfigError: the folder exists.
            StoreError: there is no run.
            WriteError: the folder cannot be written.
        """
        if await asyncio.to_thread(folder.exists):
            raise ConfigError(f"{folder} already exists; choose a new folder")
        run = await self._db.runs.find_one({}, {"schema_version": 1})
        if run is None:
            raise self._db.no_run()
        was_active = await self._is_active()
        with atomic_directory(folder) as staging:
            copy = functools.partial(self._write_files, staging, groups, everything)
            is_snapshot = True
            try:
                async with await self._snapshot() as session:
                    files = await copy(session)
            except (ConfigurationError, OperationFailure):
                # The server supports none, or no longer keeps the state at the start. Another
                # failure occurs here again.
                files = await copy(None)
                is_snapshot = False
            was_active = await self._is_active() or was_active
            is_partial = everything or groups is not None
            num_tasks = 0 if is_partial else await self._db.tasks.count_documents({})
            manifest = Manifest(
                run=run["_id"],
                schema_version=run["schema_version"],
                format=FORMAT,
                files=files,
                num_left_out=max(0, num_tasks - files["tasks"].num_documents),
                was_active=was_active,
                is_snapshot=is_snapshot or not was_active,
            )
            (staging / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    async def _is_active(self) -> bool:
        forks = self._db.of_forks()
        return bool(await live_processes(self._db) or await live_processes(forks))

    async def _snapshot(self) -> Any:
        """Return a session whose reads all show the moment of its first read."""
        session: Any = self._db.client.start_session(snapshot=True)
        return await session if inspect.isawaitable(session) else session  # Motor's is awaited

    async def _write_files(
        self,
        folder: Path,
        groups: Collection[str] | None,
        everything: bool,
        session: Any,
    ) -> dict[str, ExportedFile]:
        is_limited = groups is not None or everything
        started = None if is_limited else await self._started_groups(session)
        selection = _Selection(groups, started)
        return {
            name: await self._export_collection(
                name, folder / f"{name}.{FORMAT}", selection, session
            )
            for name in COLLECTIONS
        }

    async def _started_groups(self, session: Any) -> set[str]:
        """Return the ids of the tasks of which a slot was claimed at least once."""
        pipeline: list[Document] = [
            {"$match": {"fence": {"$gt": 0}}},
            {"$group": {"_id": "$task_id"}},
        ]
        found = await self._db.aggregate(self._db.records, pipeline, session=session)
        return {group["_id"] for group in found}

    async def _export_collection(
        self, name: str, path: Path, selection: "_Selection", session: Any
    ) -> ExportedFile:
        num_documents, size = 0, 0
        batch: list[Document] = []
        wanted = selection.wanted(name)
        if name == "blobs" and wanted:
            wanted = await self._with_parts(wanted, session)
        found = self._db[name].find(wanted, session=session)
        with path.open("w", encoding="utf-8") as file:
            async for document in found.sort("_id", 1) if wanted == {} else found:
                if not selection.includes(name, document):
                    continue
                batch.append(document)
                num_documents += 1
                size += _size(document)
                if size > BATCH_BYTES:
                    await asyncio.to_thread(write_documents, file, batch)
                    batch, size = [], 0
            await asyncio.to_thread(write_documents, file, batch)
        digest = await asyncio.to_thread(_sha256, path)
        return ExportedFile(name=path.name, num_documents=num_documents, sha256=digest)

    async def _with_parts(self, wanted: Document, session: Any) -> Document:
        """Return the filter of blobs with that of their parts."""
        whole = {**wanted, "num_parts": {"$exists": True}}
        heads = self._db.blobs.find(whole, {"num_parts": 1}, session=session)
        parts = [f"{one['_id']}/{n}" async for one in heads for n in range(one["num_parts"])]
        return {"_id": {"$in": [*wanted["_id"]["$in"], *parts]}}

    @operation("import a run", repeatable=False)
    async def import_run(self, folder: Path) -> Manifest:
        """Read an export into this database, which must be empty.

        The run takes the name of the database, and is marked as imported. Leases and heartbeats
        that no clock explains end now, since the run would count as active until then.

        Returns:
            The manifest.

        Raises:
            ConfigError: the folder holds no complete export, or one of another release.
            StoreError: the database holds a run.
        """
        manifest = await asyncio.to_thread(read_manifest, folder)
        if manifest.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"{folder} has schema version {manifest.schema_version}, and this AgentRL uses "
                f"{SCHEMA_VERSION}; use the release that wrote it"
            )
        for name in COLLECTIONS:
            if await self._db[name].find_one({}, {"_id": 1}) is not None:
                raise StoreError(
                    f"database {self._db.name!r} is not empty; import under another --run_name"
                )
        before = await self._db.collections()
        try:
            await self._prepare()
            await self._insert(folder, manifest)
        except BaseException as error:  # a Ctrl-C too
            await self._db.retried(functools.partial(self._restore, before))
            if not isinstance(error, StoreError | OperationFailure | InvalidDocument):
                raise
            raise ConfigError(f"{folder}: document rejected: {_rejection_reason(error)}") from error
        return manifest

    @operation("look for an unfinished import")
    async def is_unfinished(self) -> bool:
        """Return whether the database holds what an import that was killed leaves: no run."""
        is_made = COLLECTIONS[0] in await self._db.collections()
        return is_made and await self._db.runs.find_one({}, {"_id": 1}) is None

    async def _insert(self, folder: Path, manifest: Manifest) -> None:
        now = await self._db.server_time()
        for name in COLLECTIONS:
            if name in manifest.files:
                await self._insert_file(name, folder / manifest.files[name].name, now)
        policies = [one["_id"] async for one in self._db.policies.find({}, {"_id": 1})]
        marked = await self._db.runs.update_one({}, {"$set": {"imported_policies": policies}})
        if marked.matched_count == 0:
            raise ConfigError(f"{folder} holds no run")

    async def _insert_file(self, name: str, path: Path, now: datetime) -> None:
        for batch in _batches(read_documents(path)):
            if name == "runs":
                batch = [{**one, "_id": self._db.name} for one in batch]
            for document in batch:
                _check_document(name, document)
                _end_leases(document, now)
            await self._db[name].insert_many(batch)

    async def _restore(self, before: Collection[str]) -> None:
        """Make the database what it was before the import: these collections, without a run."""
        if not before:
            with suppress(OperationFailure):  # logins that may only read and write lack the right
                await self._db.client.drop_database(self._db.name)
                return
        for name in await self._db.collections():
            if name not in before and not name.startswith("system."):
                await self._db.handle.drop_collection(name)
            elif name in COLLECTIONS:
                await self._db[name].delete_many({})


def _check_document(name: str, document: Document) -> None:
    """Refuse what the server's validators accept and the schema does not, such as a score of NaN."""
    kind = name.removeprefix(FORKS_PREFIX)
    if kind == "tasks":  # the required fields of a task depend on its kind
        if "kind" not in document:
            raise StoreError(f"task {document['_id']!r} has no kind")
        task_from_document(document)
    elif kind == "turns":  # its values are in blobs, so it is no whole model
        rewards = {name: document.get(name) for name in ("reward", "advantage")}
        rewards["seat.reward"] = (document.get("seat") or {}).get("reward")
        for field, value in rewards.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise StoreError(f"turn {document['_id']!r}: {field} must be finite, got {value}")
    elif kind in STORED_MODELS:
        from_document(STORED_MODELS[kind], document)


def _end_leases(document: Document, now: datetime) -> None:
    """Move the dates from which a live process is recognized to now, if they are too late."""
    dates = [(document, "heartbeat_at")] if "heartbeat_at" in document else []
    leases = (document.get("lease"), *document.get("trainer_leases", {}).values())
    dates += [(lease, "expires_at") for lease in leases if lease is not None]
    for holder, field in dates:
        if holder[field] > now + _LONGEST_LEASE:
            holder[field] = now


def _rejection_reason(error: Exception) -> str:
    """Return the server's reason in one line."""
    details = error.details if isinstance(error, OperationFailure) else None
    first = ((details or {}).get("writeErrors") or [{}])[0]
    return " ".join(str(first.get("errmsg") or error).split())[:200]


class _Selection:
    """Decides which documents an export holds."""

    def __init__(self, groups: Collection[str] | None, started: Collection[str] | None) -> None:
        self._groups = None if groups is None else set(groups)
        self._started = started
        self._records: set[str] = set()
        self._blobs: set[str] = set()

    def wanted(self, name: str) -> Document:
        """Return the filter of the documents to read; call it in the order of `COLLECTIONS`."""
        if self._groups is None or name == "runs":
            return {}
        if name == "blobs":
            return {"_id": {"$in": sorted(self._blobs)}}
        if name in _OF_RECORDS:
            return {"record_id": {"$in": sorted(self._records)}}
        groups = sorted(self._groups) if name in _OF_GROUPS else []
        return {_OF_GROUPS.get(name, "_id"): {"$in": groups}}

    def includes(self, name: str, document: Document) -> bool:
        """Return whether the export holds a document that was read."""
        if self._groups is None:
            group = document.get(_SLOT_FIELDS.get(name, ""))
            return self._started is None or group is None or group in self._started
        if name == "records":
            self._records.add(document["_id"])
        if name in (*_OF_GROUPS, *_OF_RECORDS):
            self._blobs.update(_blob_keys(document))
        return True


def _blob_keys(value: Any) -> Iterator[str]:
    """Yield the keys of all blobs that a stored value refers to, at any depth; images are blobs."""
    if isinstance(value, str):
        key = stored_key(value)
        if key is not None:
            yield key
    elif isinstance(value, dict):
        key = blob_key(value)
        if key is not None:
            yield key
        for inner in value.values():
            yield from _blob_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _blob_keys(inner)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an export after checking that all its files are complete.

    Raises:
        ConfigError: a file is missing or was changed.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} is not an export: it has no {MANIFEST}") from None
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST} cannot be read: {error}".split("\n")[0]) from None
    if manifest.format != FORMAT:
        raise ConfigError(
            f"{folder} is an export in {manifest.format!r}, which this release does not read; use "
            f"the one that wrote it, and `store export --format {FORMAT}`"
        )
    unknown = sorted(manifest.files.keys() - set(COLLECTIONS))
    if unknown:
        raise ConfigError(f"{folder}: unknown collection {unknown[0]!r}")
    known = {MANIFEST, *(file.name for file in manifest.files.values())}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if foreign:
        raise ConfigError(
            f"{folder} holds {foreign[0]!r}, which no export contains; remove it, or ask the sender"
        )
    for name, file in manifest.files.items():
        path = folder / file.name
        if file.name != f"{name}.{manifest.format}" or path.is_symlink():
            raise ConfigError(
                f"{folder}: {name} is in {file.name!r}; expected a file {name}.{manifest.format}"
            )
        if not path.is_file():
            raise ConfigError(f"{path} is missing")
        if _sha256(path) != file.sha256:
            raise ConfigError(f"{path} was changed after the export: its checksum differs")
    return manifest


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += _size(document)
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(value: Any) -> int:
    """Return roughly how many bytes a stored value takes."""
    if isinstance(value, str | bytes):
        return len(value) + 8
    if isinstance(value, dict):
        return sum(16 + _size(item) for item in value.values())
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    return 8


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

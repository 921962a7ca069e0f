"""Export of a run to a folder of files, and import into an empty database.

The folder holds `manifest.json`, with the checksum of each file, and one file per collection
(`documents.export_files`). Groups that no sampler has started are left out by default, because a
run adds the questions of its file again when it continues.
"""

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from bson.errors import InvalidDocument
from pymongo.errors import OperationFailure

from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import SCHEMA_VERSION
from agentrl.schema.base import Value
from agentrl.schema.image import stored_key
from agentrl.store.collections.validators import ensure_validators
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, task_from_document
from agentrl.store.documents.export_files import ARRAYS, Format, Write, read_documents, writer
from agentrl.store.documents.packed_turns import blob_key
from agentrl.store.repositories.blobs import BlobRepository
from agentrl.store.repositories.tallies import TallyRepository

COLLECTIONS = (
    "tasks",
    "records",
    "turns",
    "record_data",
    "turn_training",
    "steps",
    "evaluations",
    "policies",
    "inference_services",
    "samplers",
    "blobs",
    # Last, so that an interrupted import is recognizable by the missing run.
    "runs",
)
_SLOT_FIELDS = {"tasks": "_id", "records": "task_id"}
"""Collections with slots -> the field that names the task."""
_GROUP_FIELDS = _SLOT_FIELDS | dict.fromkeys(("turns", "record_data", "turn_training"), "task_id")
MANIFEST = "manifest.json"
BATCH_BYTES = 8 * 2**20


class Manifest(Value):
    """The contents of an export."""

    run: str
    schema_version: int
    format: Format
    files: dict[str, "ExportedFile"]
    """Counts by collection."""
    num_left_out: int = 0
    """Number of groups that no sampler had started."""


class ExportedFile(Value):
    """One file of an export."""

    name: str
    num_documents: int
    sha256: str


class TransferRepository(Repository):
    """Copies the run out of the database, and into an empty one."""

    def __init__(
        self, database: RunDatabase, blobs: BlobRepository, tallies: TallyRepository
    ) -> None:
        super().__init__(database)
        self._blobs = blobs
        self._tallies = tallies

    @operation("export the run", repeatable=False)
    async def export_run(
        self,
        folder: Path,
        format_: Format = "jsonl",
        *,
        everything: bool = False,
        groups: Collection[str] | None = None,
    ) -> Manifest:
        """Write the run to `folder`, which must not exist yet.

        The collections are written one after another, so documents that a live run adds during the
        export may be in one file and missing in another.

        Args:
            folder: the folder to create.
            format_: format of the files.
            everything: include the groups that no sampler has started.
            groups: ids of the tasks to which the export is limited, with the documents they need.

        Raises:
            ConfigError: the folder exists, or Parquet is requested without pyarrow.
            StoreError: there is no run.
            WriteError: the folder cannot be written.
        """
        if await asyncio.to_thread(folder.exists):
            raise ConfigError(f"{folder} already exists; choose a new folder")
        run = await self._db.runs.find_one({}, {"schema_version": 1})
        if run is None:
            raise self._db.no_run()
        writer(format_)
        selection = _Selection(groups, None if everything else await self._started_groups())
        with atomic_directory(folder) as staging:
            files = {
                name: await self._export_collection(
                    name, staging / f"{name}.{format_}", format_, selection
                )
                for name in COLLECTIONS
            }
            num_tasks = await self._db.tasks.count_documents({})
            manifest = Manifest(
                run=run["_id"],
                schema_version=run["schema_version"],
                format=format_,
                files=files,
                num_left_out=0 if everything else max(0, num_tasks - files["tasks"].num_documents),
            )
            (staging / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    async def _started_groups(self) -> set[str]:
        """Return the ids of the tasks of which a slot was claimed at least once."""
        pipeline: list[Document] = [
            {"$match": {"fence": {"$gt": 0}}},
            {"$group": {"_id": "$task_id"}},
        ]
        return {group["_id"] async for group in await self._db.records.aggregate(pipeline)}

    async def _export_collection(
        self, name: str, path: Path, format_: Format, selection: "_Selection"
    ) -> ExportedFile:
        num_documents, size = 0, 0
        batch: list[Document] = []
        with writer(format_)(path, name) as write:
            async for document in self._db[name].find().sort("_id", 1):
                if not selection.includes(name, document):
                    continue
                batch.append(document)
                num_documents += 1
                size += _size(document)
                if size > BATCH_BYTES:
                    await self._write(write, batch, format_)
                    batch, size = [], 0
            await self._write(write, batch, format_)
        digest = await asyncio.to_thread(_sha256, path)
        return ExportedFile(name=path.name, num_documents=num_documents, sha256=digest)

    async def _write(self, write: Write, batch: list[Document], format_: Format) -> None:
        keys: set[str] = set()
        if format_ == "parquet":
            moved = (blob_key(document.get(name)) for document in batch for name in ARRAYS)
            keys = {key for key in moved if key is not None}
        await asyncio.to_thread(write, batch, await self._blobs.get(keys))

    @operation("import a run", repeatable=False)
    async def import_run(self, folder: Path) -> Manifest:
        """Read an export into this database, which must be empty.

        The run takes the name of the database.

        Raises:
            ConfigError: the folder holds no complete export, or one of another release.
            StoreError: the database holds a run.
        """
        manifest = await asyncio.to_thread(read_manifest, folder)
        if manifest.schema_version > SCHEMA_VERSION:
            raise ConfigError(
                f"{folder} has schema version {manifest.schema_version}, and this AgentRL supports "
                f"{SCHEMA_VERSION}; use a newer release"
            )
        for name in COLLECTIONS:
            if await self._db[name].find_one({}, {"_id": 1}) is not None:
                raise StoreError(
                    f"database {self._db.name!r} is not empty; import under another --run_name"
                )
        await self._db.tallies.delete_many({})  # those of an empty run
        # The server then rejects documents without the required fields.
        await ensure_validators(self._db)
        try:
            await self._insert(manifest, folder)
        except (ConfigError, StoreError, OperationFailure, InvalidDocument) as error:
            for name in COLLECTIONS:
                await self._db[name].delete_many({})
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{folder}: document rejected: {_rejection_reason(error)}") from error
        await self._tallies.prepare()
        return manifest

    async def _insert(self, manifest: Manifest, folder: Path) -> None:
        for name, file in manifest.files.items():
            for batch in _batches(read_documents(folder / file.name, manifest.format)):
                if name == "runs":
                    batch = [{**one, "_id": self._db.name} for one in batch]
                if name == "tasks":  # the required fields of a task depend on its kind
                    for document in batch:
                        if "kind" not in document:
                            raise StoreError(f"task {document['_id']!r} has no kind")
                        task_from_document(document)
                await self._db[name].insert_many(batch)


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
        self._blobs: set[str] = set()

    def includes(self, name: str, document: Document) -> bool:
        """Return whether the export holds a document; call it for blobs after their referrers."""
        if self._groups is None:
            group = document.get(_SLOT_FIELDS.get(name, ""))
            return self._started is None or group is None or group in self._started
        if name == "blobs":
            return document["_id"].partition("/")[0] in self._blobs
        if name not in _GROUP_FIELDS:
            return name == "runs"
        if document[_GROUP_FIELDS[name]] not in self._groups:
            return False
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
    unknown = sorted(manifest.files.keys() - set(COLLECTIONS))
    if unknown:
        raise ConfigError(f"{folder}: unknown collection {unknown[0]!r}")
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

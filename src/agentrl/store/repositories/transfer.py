"""A run as files, and back again without loss.

A folder holds `manifest.json` and one file a collection. JSONL files hold one document a line in
MongoDB's canonical Extended JSON (`mongoimport` reads them too). Parquet files hold the same in the
column `document`, with the token arrays taken out into columns of their own: int32 and float32
lists that any reader of Parquet understands.
"""

import asyncio
import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from bson import Binary
from bson.json_util import CANONICAL_JSON_OPTIONS, JSONOptions, dumps, loads

from agentrl.errors import ConfigError, StoreError
from agentrl.schema import SCHEMA_VERSION
from agentrl.schema.base import Value
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import Document

Format = Literal["jsonl", "parquet"]
COLLECTIONS = (
    "tasks",
    "records",
    "turns",
    "record_data",
    "turn_training",
    "policies",
    "inference_services",
    "samplers",
    "blobs",
    # Last: a database without its run is seen to be unfinished.
    "runs",
)
MANIFEST = "manifest.json"
BATCH_BYTES = 8 * 2**20
_JSON: JSONOptions = CANONICAL_JSON_OPTIONS.with_options(tz_aware=True)
_ARRAYS = {"added_ids": "int32", "output_ids": "int32", "output_logprobs": "float32"}
"""Binary fields of turns -> their element type."""


class Manifest(Value):
    """What an export holds."""

    run: str
    schema_version: int
    format: Format
    files: dict[str, "ExportedFile"]
    """By collection."""


class ExportedFile(Value):
    """One file of an export."""

    name: str
    num_documents: int
    sha256: str


class TransferRepository(Repository):
    """Copies the run out of the database, and into an empty one."""

    @operation("export the run", repeatable=False)
    async def export_run(self, folder: Path, format_: Format = "jsonl") -> Manifest:
        """Write the run to `folder`, which must not exist yet.

        A run that goes on is written collection by collection: what it adds meanwhile may be in
        one file and not in another.

        Raises:
            ConfigError: the folder exists, or Parquet is asked for without pyarrow.
            StoreError: there is no run.
        """
        if await asyncio.to_thread(folder.exists):
            raise ConfigError(f"{folder} exists already; name a folder that does not")
        run = await self._database["runs"].find_one({}, {"schema_version": 1})
        if run is None:
            raise self._database.no_run()
        make = _writer(format_)
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        staging.mkdir(parents=True)
        try:
            files = {
                name: await self._export_collection(name, staging / f"{name}.{format_}", make)
                for name in COLLECTIONS
            }
            manifest = Manifest(
                run=run["_id"], schema_version=run["schema_version"], format=format_, files=files
            )
            (staging / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return manifest

    async def _export_collection(
        self, name: str, path: Path, make: Callable[[Path, str], "_Writer"]
    ) -> ExportedFile:
        num_documents, size = 0, 0
        batch: list[Document] = []
        with make(path, name) as writer:
            async for document in self._database[name].find().sort("_id", 1):
                batch.append(document)
                num_documents += 1
                size += _size(document)
                if size > BATCH_BYTES:
                    await asyncio.to_thread(writer.write, batch)
                    batch, size = [], 0
            await asyncio.to_thread(writer.write, batch)
        digest = await asyncio.to_thread(_sha256, path)
        return ExportedFile(name=path.name, num_documents=num_documents, sha256=digest)

    @operation("import a run", repeatable=False)
    async def import_run(self, folder: Path) -> Manifest:
        """Read an export into this database, which must be empty.

        The run keeps its name only when the database has it; otherwise it takes the database's.

        Raises:
            ConfigError: the folder holds no whole export, or one of another release.
            StoreError: the database holds a run.
        """
        manifest = await asyncio.to_thread(read_manifest, folder)
        if manifest.schema_version > SCHEMA_VERSION:
            raise ConfigError(
                f"{folder} has schema version {manifest.schema_version}, this AgentRL knows "
                f"{SCHEMA_VERSION}; use a newer release"
            )
        for name in COLLECTIONS:
            if await self._database[name].find_one({}, {"_id": 1}) is not None:
                raise StoreError(
                    f"database {self._database.name!r} is not empty; import under another --run_name"
                )
        for name, file in manifest.files.items():
            for batch in _batches(_READERS[manifest.format](folder / file.name)):
                if name == "runs":
                    batch = [{**one, "_id": self._database.name} for one in batch]
                await self._database[name].insert_many(batch)
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an export after checking that all its files are whole.

    Raises:
        ConfigError: a file is missing or was changed.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no export: it has no {MANIFEST}") from None
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST} cannot be read: {error}".split("\n")[0]) from None
    unknown = sorted(manifest.files.keys() - set(COLLECTIONS))
    if unknown:
        raise ConfigError(f"{folder}: unknown collection {unknown[0]!r}")
    for file in manifest.files.values():
        path = folder / file.name
        if not path.is_file():
            raise ConfigError(f"{path} is missing")
        if _sha256(path) != file.sha256:
            raise ConfigError(f"{path} is not as it was exported: its checksum differs")
    return manifest


class _Writer(Protocol):
    def write(self, batch: list[Document]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class _JsonlWriter:
    def __init__(self, path: Path, collection: str) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: list[Document]) -> None:
        self._file.writelines(dumps(document, json_options=_JSON) + "\n" for document in batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


class _ParquetWriter:
    """One row a document."""

    def __init__(self, path: Path, collection: str) -> None:
        self._arrow = _pyarrow()
        arrow = self._arrow.lib
        self._arrays = _ARRAYS if collection == "turns" else {}
        fields = [arrow.field("id", arrow.string()), arrow.field("document", arrow.string())]
        fields += [
            arrow.field(name, arrow.list_(getattr(arrow, kind)()))
            for name, kind in self._arrays.items()
        ]
        self._schema = arrow.schema(fields)
        self._writer = self._arrow.parquet.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, batch: list[Document]) -> None:
        if not batch:
            return
        rows: dict[str, list[Any]] = {name: [] for name in self._schema.names}
        for document in batch:
            rest = dict(document)
            for name, kind in self._arrays.items():
                held = rest.get(name)
                # A large array is in `blobs`; what stands here is a reference to it.
                if isinstance(held, bytes):
                    rows[name].append(np.frombuffer(held, dtype=np.dtype(kind).newbyteorder("<")))
                    rest[name] = None  # its place among the fields is kept
                else:
                    rows[name].append(None)
            rows["id"].append(str(document["_id"]))
            rows["document"].append(dumps(rest, json_options=_JSON))
        self._writer.write_table(self._arrow.lib.table(rows, schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()


class _Arrow:
    """The two modules of pyarrow that are used."""

    def __init__(self, lib: Any, parquet: Any) -> None:
        self.lib = lib
        self.parquet = parquet


def _pyarrow() -> _Arrow:
    try:
        lib, parquet = (
            importlib.import_module("pyarrow"),
            importlib.import_module("pyarrow.parquet"),
        )
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'agentrl-mongo[parquet]'") from None
    return _Arrow(lib, parquet)


def _writer(format_: Format) -> Callable[[Path, str], _Writer]:
    if format_ == "parquet":
        _pyarrow()  # its absence is said before anything is written
        return _ParquetWriter
    return _JsonlWriter


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield loads(line, json_options=_JSON)


def _read_parquet(path: Path) -> Iterator[Document]:
    with _pyarrow().parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            columns = {name: batch.column(name) for name in batch.schema.names}
            for number in range(batch.num_rows):
                document: Document = loads(columns["document"][number].as_py(), json_options=_JSON)
                for name, kind in _ARRAYS.items():
                    cell = columns[name][number] if name in columns else None
                    if cell is not None and cell.is_valid:
                        values = cell.values.to_numpy(zero_copy_only=False)
                        order = np.dtype(kind).newbyteorder("<")
                        document[name] = Binary(values.astype(order).tobytes())
                yield document


_READERS: Mapping[Format, Callable[[Path], Iterator[Document]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


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

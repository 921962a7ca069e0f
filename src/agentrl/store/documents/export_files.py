"""The files of an export: one a collection, written and read in batches, without loss.

JSONL files hold one document a line in MongoDB's canonical Extended JSON (`mongoimport` reads them
too). Parquet files hold the same in the column `document`, with the token arrays taken out into
columns of their own: int32 and float32 lists that any reader of Parquet understands.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bson import Binary
from bson.json_util import CANONICAL_JSON_OPTIONS, JSONOptions, dumps, loads

from agentrl.errors import ConfigError
from agentrl.store.documents.codec import Document

Format = Literal["jsonl", "parquet"]
Write = Callable[[list[Document]], None]
"""Appends a batch of documents to a file."""

_JSON: JSONOptions = CANONICAL_JSON_OPTIONS.with_options(tz_aware=True)
_ARRAYS = {
    name: np.dtype(kind)
    for name, kind in (("added_ids", "<i4"), ("output_ids", "<i4"), ("output_logprobs", "<f4"))
}
"""Binary fields of turns -> their element type, little endian."""


def writer(format_: Format) -> Callable[[Path, str], AbstractContextManager[Write]]:
    """Return the function that opens a file for the documents of a collection.

    Raises:
        ConfigError: pyarrow is missing for Parquet: said before anything is written.
    """
    if format_ == "parquet":
        _pyarrow("pyarrow")
        return _parquet_writer
    return _jsonl_writer


def read_documents(path: Path, format_: Format) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        ConfigError: pyarrow is missing for Parquet.
    """
    return _read_parquet(path) if format_ == "parquet" else _read_jsonl(path)


@contextmanager
def _jsonl_writer(path: Path, _collection: str) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda batch: file.writelines(dumps(one, json_options=_JSON) + "\n" for one in batch)


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield loads(line, json_options=_JSON)


@contextmanager
def _parquet_writer(path: Path, collection: str) -> Iterator[Write]:
    arrow = _pyarrow("pyarrow")
    arrays = _ARRAYS if collection == "turns" else {}
    schema = arrow.schema(
        [
            arrow.field("id", arrow.string()),
            arrow.field("document", arrow.string()),
            *(
                arrow.field(name, arrow.list_(arrow.from_numpy_dtype(kind)))
                for name, kind in arrays.items()
            ),
        ]
    )

    def write(batch: list[Document]) -> None:
        if not batch:
            return
        rows: dict[str, list[Any]] = {name: [] for name in schema.names}
        for document in batch:
            rest = dict(document)
            for name, kind in arrays.items():
                held = rest.get(name)
                # A large array is in `blobs`; what stands here is a reference to it.
                if isinstance(held, bytes):
                    rows[name].append(np.frombuffer(held, dtype=kind))
                    rest[name] = None  # its place among the fields is kept
                else:
                    rows[name].append(None)
            rows["id"].append(str(document["_id"]))
            rows["document"].append(dumps(rest, json_options=_JSON))
        file.write_table(arrow.table(rows, schema=schema))

    with _pyarrow("pyarrow.parquet").ParquetWriter(path, schema, compression="zstd") as file:
        yield write


def _read_parquet(path: Path) -> Iterator[Document]:
    with _pyarrow("pyarrow.parquet").ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            columns = {name: batch.column(name) for name in batch.schema.names}
            for number in range(batch.num_rows):
                document: Document = loads(columns["document"][number].as_py(), json_options=_JSON)
                for name, kind in _ARRAYS.items():
                    cell = columns[name][number] if name in columns else None
                    if cell is not None and cell.is_valid:
                        values = cell.values.to_numpy(zero_copy_only=False)
                        document[name] = Binary(values.astype(kind).tobytes())
                yield document


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'agentrl-mongo[parquet]'") from None

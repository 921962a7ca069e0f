"""Question files without an end, or that unpack to far more than they are."""

import gzip
import importlib
import os
from pathlib import Path


def pipe(folder: Path) -> Path:
    """Make a pipe that nobody writes to."""
    path = folder / "pipe.jsonl"
    os.mkfifo(path)
    return path


def endless_line(folder: Path) -> Path:
    """Write a packed line of 1.5 GB."""
    path = folder / "line.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(1500):
            file.write(b"x" * 2**20)
    return path


def endless_element(folder: Path) -> Path:
    """Write a packed list whose first element has 1.5 GB."""
    path = folder / "list.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'["')
        for _ in range(1500):
            file.write(b"x" * 2**20)
    return path


def parquet_bomb(folder: Path) -> Path:
    """Write a table that unpacks to 1.6 GB."""
    pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    path = folder / "bomb.parquet"
    cell = "x" * 2**22
    table = pa.table({"question": pa.array([cell] * 400)})
    parquet.write_table(table, path, use_dictionary=False, compression="zstd")
    return path


def repeated_cells(folder: Path) -> Path:
    """Write a table whose 64 cells are one text of 32 MB."""
    pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    path = folder / "cells.parquet"
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), ["x" * 2**25])
    parquet.write_table(pa.table({"question": cells}), path, store_schema=False)
    return path

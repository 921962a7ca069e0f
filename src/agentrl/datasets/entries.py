"""Read the entries of data files one at a time, in any supported format.

Formats: JSONL and JSON lists, CSV, TSV (all of these also compressed, `.gz`), Parquet, Hugging Face
datasets on the hub or on disk. No format is read whole, so a file may be far larger than memory.
Callers interpret the entries (`question`, `demonstrations`).
"""

import csv
import gzip
import importlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from agentrl.errors import DatasetError
from agentrl.runtime.http.http_clients import unreachable_reason

_CHUNK_CHARS = 1 << 16
_WHITESPACE = " \t\r\n"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAX_ENTRY_CHARS = 1 << 27
"""Maximum length of a line, list element or cell; a small compressed file may expand far beyond it."""
_PARQUET_BATCH_ROWS = 64
_BATCH_BYTES = 256 << 20
"""Maximum size of rows read at once, if each cell is as large as its chunk."""
_MAX_BATCH_BYTES = 1 << 30
_MAX_COMPRESSION_RATIO = 500
"""Maximum ratio of a Parquet file's decompressed size to its size, above one gigabyte."""


_TOO_LONG = f"longer than {_MAX_ENTRY_CHARS >> 20} Mi characters"
_TOO_MANY_DIGITS = "not usable JSON: a number has too many digits"


class BadEntry(DatasetError):
    """One entry is malformed; the caller adds the file's name and the entry's position."""


Entry = tuple[str, Any]
"""An entry's place in the file ("line 3") and its decoded value, or a `BadEntry` for a malformed one."""


def read_entries(source: Path) -> Iterator[Entry]:
    """Yield the entries of a dataset.

    It is a `.csv`, `.tsv`, `.parquet` or JSON file (JSONL or one list), a directory that `datasets`
    can load, or a Hugging Face dataset, `owner/name` or `owner/name@config`; `:split` may follow the
    last two.
    """
    kind = _kind(source)
    if source.parts[:1] in (("http:",), ("https:",)):
        raise DatasetError(f"{source}: URLs are not supported; download the file first")
    if source.exists() and not (source.is_file() or source.is_dir()):
        raise DatasetError(
            f"{source}: devices and pipes are not supported, because the data is read twice; give "
            "a file"
        )
    if kind == ".parquet":
        yield from _with_file_errors(source, _read_parquet)
    elif kind in _DELIMITERS:
        yield from _with_file_errors(source, _read_csv)
    elif source.is_file() or kind in (".json", ".jsonl"):
        yield from _with_file_errors(source, _read_json)
    elif _folder(source).is_dir() or _is_hub_name(source):
        yield from _read_hub(source)
    else:
        raise _missing_error(source)


def folder_of(source: Path) -> Path | None:
    """Return the folder whose files the entries of a dataset may name; None for one of the hub."""
    folder = _folder(source)
    if folder.is_dir():
        return folder
    return source.parent if source.is_file() or not _is_hub_name(source) else None


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _missing_error(path: Path) -> DatasetError:
    return DatasetError(f"{path}: No such file or directory in {path.absolute().parent}")


def _with_file_errors(path: Path, read: Callable[[Path], Iterable[Entry]]) -> Iterator[Entry]:
    try:
        yield from read(path)
    except FileNotFoundError:
        raise _missing_error(path) from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text ({error.reason})") from None
    except (EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: the compressed file is damaged ({error})") from None


def _open(path: Path, newline: str | None = None) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=newline))
    return path.open(encoding="utf-8-sig", newline=newline)


def _read_json(path: Path) -> Iterator[Entry]:
    with _open(path) as file:
        first = file.read(1)
        while first and first in _WHITESPACE:
            first = file.read(1)
        file.seek(0)
        if first == "[":
            yield from _read_json_list(path, file)
            return
        lines = iter(partial(file.readline, _MAX_ENTRY_CHARS + 1), "")
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_ENTRY_CHARS:
                raise DatasetError(f"{path}: line {number}: {_TOO_LONG}")
            if line.strip():
                yield f"line {number}", _decode_line(line)


def _decode_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        if line.strip() == "{":
            return BadEntry(
                "an object starts here and spans several lines; write each object on one line, or "
                "all in a list [...]"
            )
        return BadEntry(f"not valid JSON: {error.msg} (column {error.colno})")
    except ValueError:
        return BadEntry(_TOO_MANY_DIGITS)
    except RecursionError:
        return BadEntry("not usable JSON: nested too deeply")


def _read_json_list(path: Path, file: TextIO) -> Iterator[Entry]:
    """Decode one element after the other; only the current one is in memory."""
    window = _Window(file)
    window.skip(_WHITESPACE)
    window.take("[")
    decode = json.JSONDecoder().raw_decode
    number = 0
    window.skip(_WHITESPACE)
    while not window.take("]"):
        number += 1
        if number > 1:
            if not window.take(","):
                raise DatasetError(f"{path}: line {window.line}: not valid JSON: expected , or ]")
            window.skip(_WHITESPACE)
        yield f"entry {number}", _next_element(path, window, decode)
        window.skip(_WHITESPACE)
    window.skip(_WHITESPACE)
    if window.text:
        raise DatasetError(f"{path}: line {window.line}: not valid JSON: text after the list")


class _Window:
    """The part of a file that is being decoded, and the number of its first line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text = ""
        self.line = 1
        self.more()

    def more(self) -> bool:
        """Double the window, which keeps the total cost linear; False at the end of the file."""
        chunk = self._file.read(max(_CHUNK_CHARS, len(self.text)))
        self.text += chunk
        return bool(chunk)

    def advance(self, num_chars: int) -> None:
        """Drop leading characters that were decoded."""
        self.line += self.text.count("\n", 0, num_chars)
        self.text = self.text[num_chars:]

    def skip(self, chars: str) -> None:
        """Drop all leading characters that are among these."""
        while True:
            rest = self.text.lstrip(chars)
            self.advance(len(self.text) - len(rest))
            if self.text or not self.more():
                return

    def take(self, char: str) -> bool:
        """Drop this character if it comes next; return whether it was dropped."""
        if not self.text.startswith(char):
            return False
        self.advance(1)
        return True


def _next_element(path: Path, window: _Window, decode: Callable[[str], tuple[Any, int]]) -> Any:
    while True:
        try:
            value, end = decode(window.text)
        except json.JSONDecodeError as error:
            if len(window.text) > _MAX_ENTRY_CHARS:
                raise DatasetError(f"{path}: line {window.line}: {_TOO_LONG}") from None
            if window.more():
                continue
            line = window.line + window.text.count("\n", 0, error.pos)
            raise DatasetError(
                f"{path}: line {line}: not valid JSON: {error.msg} (column {error.colno})"
            ) from None
        except ValueError:
            raise DatasetError(f"{path}: line {window.line}: {_TOO_MANY_DIGITS}") from None
        except RecursionError:
            raise DatasetError(
                f"{path}: line {window.line}: not usable JSON: nested too deeply"
            ) from None
        # A number at the end of the window may continue after it: 12 and then 34.
        if end == len(window.text) and window.more():
            continue
        window.advance(end)
        return value


def _read_csv(path: Path) -> Iterator[Entry]:
    # The module's limit of 128 KiB a cell is shorter than many system prompts with tools.
    csv.field_size_limit(min(_MAX_ENTRY_CHARS, sys.maxsize))
    with _open(path, newline="") as file:
        rows = csv.DictReader(file, strict=True, delimiter=_DELIMITERS[_kind(path)])
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        _check_delimiter(path, rows.fieldnames)
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise DatasetError(f"{path}: line {line}: not valid CSV: {error}") from None
            if row is None:
                if rows.line_num == 1:
                    raise DatasetError(
                        f"{path}: has only one line, which is the header (such as query,answer); "
                        "put JSON lines in a .jsonl file"
                    )
                return
            if None in row:
                yield f"line {rows.line_num}", BadEntry("more cells than the header has columns")
            else:
                # An empty cell has no value; every other cell is text, including `0` and `false`.
                yield f"line {rows.line_num}", {key: cell for key, cell in row.items() if cell}


def _check_delimiter(path: Path, names: Sequence[str]) -> None:
    """Refuse a header with another delimiter, because each line would be a single cell."""
    for other, found in ((";", "semicolons"), ("\t", "tabs"), (",", "commas")):
        if len(names) == 1 and other in names[0]:
            kind, delimiter = ("TSV", "tabs") if _kind(path) == ".tsv" else ("CSV", "commas")
            raise DatasetError(
                f"{path}: columns are separated by {found}; a {kind} file uses {delimiter}"
            )


def _read_parquet(path: Path) -> Iterator[Entry]:
    module = _import_optional("pyarrow.parquet", path)
    errors = _import_optional("pyarrow", path).ArrowException
    number = 0
    try:
        with path.open("rb") as opened, module.ParquetFile(opened) as file:
            groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
            decompressed_bytes = sum(group.total_byte_size for group in groups)
            if decompressed_bytes > max(
                _MAX_BATCH_BYTES, _MAX_COMPRESSION_RATIO * path.stat().st_size
            ):
                raise DatasetError(
                    f"{path}: decompresses to {decompressed_bytes >> 20} MiB, more than "
                    f"{_MAX_COMPRESSION_RATIO} times its size"
                )
            # All cells of a chunk may refer to one text, which is copied into each cell on reading.
            sizes = (
                group.column(at).total_uncompressed_size
                for group in groups
                for at in range(group.num_columns)
            )
            rows = min(_PARQUET_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, *sizes)))
            for batch in file.iter_batches(batch_size=rows):
                if batch.nbytes > _MAX_BATCH_BYTES:
                    raise DatasetError(
                        f"{path}: row {number + 1}: {batch.num_rows} rows are larger than "
                        f"{_MAX_BATCH_BYTES >> 20} MiB"
                    )
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except errors as error:
        raise DatasetError(f"{path}: not a readable Parquet file ({error})") from None


def _is_hub_name(source: Path) -> bool:
    return not source.is_absolute() and len(source.parts) == 2 and not source.suffix


def _folder(source: Path) -> Path:
    return Path(str(source).partition(":")[0])


def _read_hub(source: Path) -> Iterator[Entry]:
    """Stream a dataset from the hub, or read one that was saved to disk."""
    datasets = _import_optional("datasets", source)
    text, _, split = str(source).partition(":")
    name, _, config = text.partition("@")
    split = split or "train"
    if not Path(text).is_dir():
        _check_hub_reachable(source)
    try:
        if (Path(text) / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(text)[split].to_iterable_dataset()
        elif (Path(text) / "dataset_info.json").is_file():
            rows = datasets.load_from_disk(text).to_iterable_dataset()
        else:
            # An absolute path, because `datasets` interprets `.` as a name.
            name = str(Path(name).absolute()) if Path(name).is_dir() else name
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        # Without decoding, images remain the bytes stored in the dataset.
        # Rows of CSV files have no declared features, and need no decoding.
        rows = rows if rows.features is None else rows.decode(False)
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row
    except StopIteration:  # of `datasets`, if it finds no first row
        raise DatasetError(
            f"{source}: the data files in it are empty; give a file or a folder with data"
        ) from None
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"{source}: cannot load the dataset: {type(error).__name__}: {reason}"
        ) from None


def _check_hub_reachable(source: Path) -> None:
    hub = _import_optional("huggingface_hub.constants", source)
    reason = None if hub.HF_HUB_OFFLINE else unreachable_reason(hub.ENDPOINT)
    if reason is not None:
        raise DatasetError(
            f"{source}: no such file or folder here, and the hub at {hub.ENDPOINT} cannot be "
            f"reached ({reason}); give a file, or set HF_HUB_OFFLINE=1 to use a dataset from the "
            "local cache"
        )


def _import_optional(module: str, source: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DatasetError(
            f"{source}: reading it needs {module.partition('.')[0]}, which cannot be imported "
            f"({error}); install it with `pip install 'agentrl-mongo[data]'`"
        ) from None

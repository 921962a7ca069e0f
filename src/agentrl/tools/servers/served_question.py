"""What a rollout's own tool servers are told of the question: ids, own columns, and a fixture.

`${question_id}` and `${row.COLUMN}` in a server's settings stand for the id and for a column of
`MCPTask.columns`. Rows are untrusted: a placeholder opens no path behind the wall, and the files that a
fixture names lie below the folder of the question file.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.errors import ConfigError, DatasetError, ToolError
from agentrl.runtime.row_files import open_row_file

PLACEHOLDER = re.compile(r"\$\{(?:(?P<name>rollout_dir|question_id)|row\.(?P<column>[^}]+))\}")
"""What only a rollout gives a value: its private directory, the id of its question, and a column of
the question's row. A `per_rollout` command has them in its arguments, variables and working directory,
a `per_rollout` address in its headers."""
ROW_FILE = "row.json"
QUESTION_HEADER = "X-AgentRL-Question"
ROLLOUT_HEADER = "X-AgentRL-Rollout"
MAX_FIXTURE_BYTES = 64 * 2**20
"""Largest sum of the files of one fixture, which every rollout copies."""


@dataclass(frozen=True)
class ServedQuestion:
    """The question of a rollout, as its tool servers may learn it.

    Attributes:
        id: of the question in its dataset.
        rollout: id of the Record.
        columns: the question's own columns.
        folder: whose files a fixture may name: that of the question file, if there is one.
    """

    id: str = ""
    rollout: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def filled(self, text: str, rollout_dir: Path | None = None) -> str:
        """Return a setting with the values of its placeholders; refuse a column that is missing."""

        def value(match: re.Match[str]) -> str:
            if match["column"] is not None:
                return self._column(match["column"])
            return self.id if match["name"] == "question_id" else str(rollout_dir)

        return PLACEHOLDER.sub(value, text)

    def headers(self) -> dict[str, str]:
        """Return the headers that name question and rollout to an HTTP server, percent-encoded."""
        ids = {QUESTION_HEADER: self.id, ROLLOUT_HEADER: self.rollout}
        return {name: quote(value, safe="/:@~ ") for name, value in ids.items() if value}

    def prepare(self, fixture: str, row: Sequence[str], rollout_dir: Path) -> None:
        """Put a fixture, and columns as `row.json`, into the folder of a rollout.

        Raises:
            ConfigError: the question lacks a column that the settings name.
            ToolError: the fixture is missing, too large, or leads out of its folder.
        """
        if fixture:
            name = self.filled(fixture, rollout_dir)
            try:
                self._check_place(name)
                _copy_fixture(self.folder, name, rollout_dir)
            except (DatasetError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ToolError(f"fixture {name!r} of question {self.id!r}: {reason}") from None
        if row:
            shown = {column: self._value(column) for column in row}
            text = json.dumps({"question_id": self.id, **shown}, ensure_ascii=False)
            (rollout_dir / ROW_FILE).write_text(text, encoding="utf-8")

    def check_fixture(self, fixture: str) -> None:
        """Raise ConfigError unless the fixture exists below the folder of the question file."""
        name = self.filled(fixture)
        try:
            self._check_place(name)
        except DatasetError as problem:
            raise ConfigError(f"fixture {name!r} of question {self.id!r} {problem}") from None

    def _check_place(self, name: str) -> None:
        """Refuse what is elsewhere, before anything of it is looked at."""
        folder = None if self.folder is None else self.folder.resolve()
        if folder is None or not (folder / name).resolve().is_relative_to(folder):
            raise DatasetError("is not below the folder of its file")
        if not (folder / name).exists():
            raise DatasetError(f"does not exist in {folder}")

    def _column(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _value(self, name: str) -> Any:
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise ConfigError(
                f"${{row.{name}}}: question {self.id!r} has no column {name!r} (own columns: {known})"
            )
        return self.columns[name]


NO_QUESTION = ServedQuestion()
"""Of the connection that lists a server's tools, and of rollouts without a question."""


def _copy_fixture(folder: Path | None, name: str, target: Path) -> None:
    """Copy a file, or the content of a folder, that a row names."""
    root = None if folder is None else folder.resolve() / name
    if root is None or not root.is_dir():
        _copy_file(folder, name, target / Path(name).name, MAX_FIXTURE_BYTES)
        return
    room = MAX_FIXTURE_BYTES
    for place, _, files in os.walk(root):
        inner = Path(place).relative_to(root)
        (target / inner).mkdir(exist_ok=True)
        for file in files:
            room -= _copy_file(folder, f"{name}/{inner / file}", target / inner / file, room)


def _copy_file(folder: Path | None, name: str, target: Path, room: int) -> int:
    """Copy one file and return its size."""
    with open_row_file(folder, name) as source:
        size = os.fstat(source.fileno()).st_size
        if size > room:
            raise DatasetError(f"larger than {MAX_FIXTURE_BYTES >> 20} MiB")
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        target.chmod(os.fstat(source.fileno()).st_mode & 0o700 | 0o600)
    return size

"""Read question files, which may be far larger than memory.

A file is read once into a spool file on disk; only 16 bytes per question stay in memory. A file
with a bad entry is refused entirely, before anything is sampled, and the error names its bad lines.
"""

import hashlib
import os
import pickle
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import folder_of, read_entries
from agentrl.datasets.question import Question, ScorerCheck, left_out, question_of, unread_keys
from agentrl.errors import ConfigError, DatasetError

_MAX_NAMED_PROBLEMS = 3


class QuestionFile(Sequence[Question]):
    """The questions of a file, on disk in the order of the file; a context manager.

    Example:
        with QuestionFile(path, config.data, MCPScorerFactory.check_question) as questions:
            print(len(questions), questions.scorers, questions[0].query)
    """

    def __init__(
        self, path: Path, defaults: DataSection, check_scorer: ScorerCheck | None = None
    ) -> None:
        """Read and check the whole file; the error names the first few bad entries.

        An entry is bad if it is malformed, repeats an id, or is refused by `check_scorer`.
        """
        self._path = path
        self._ends = array("Q", [0])
        """End offsets of the questions in the spool, preceded by 0."""
        self._scorers: set[str] = set()
        self.has_images = False
        """Whether a question contains images."""
        self.num_without_scorer = 0
        """Questions that have the default scorer because they name none."""
        self.unread_keys: dict[str, None] = {}
        """Own columns of plain entries, in order of appearance; see `question.unread_keys`."""
        self.common_columns: set[str] | None = None
        """Names in `Question.columns` of every question."""
        self.columns_left_out: dict[str, None] = {}
        """Columns that are too long, or of a type that no document can hold."""
        self.other_requests: dict[tuple[str, str], tuple[int, str]] = {}
        """Questions whose text asks for another answer schema than the one looked for: by the two
        schemas, their number and the first one's place."""
        self._shortest = self._longest = (0, 0)
        # An unlinked file disappears with the process, however it ends.
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._fill(defaults, check_scorer)
        except BaseException:
            self.close()
            raise

    @property
    def scorers(self) -> frozenset[str]:
        """Names of all scorers that the questions use."""
        return frozenset(self._scorers)

    @property
    def extremes(self) -> tuple[Question, Question]:
        """The questions with the least and with the most text."""
        return self[self._shortest[1]], self[self._longest[1]]

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Question: ...

    @overload
    def __getitem__(self, index: slice) -> list[Question]: ...

    def __getitem__(self, index: int | slice) -> Question | list[Question]:
        """Read questions back from the spool."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return self._read(index)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the disk space."""
        self._spool.close()

    def _fill(self, defaults: DataSection, check_scorer: ScorerCheck | None) -> None:
        places: dict[str, str] = {}  # the first few problems, each with its first position
        num_problems = 0
        digests = array("Q")

        def add_problem(where: str, problem: object) -> None:
            nonlocal num_problems
            num_problems += 1
            if len(places) < _MAX_NAMED_PROBLEMS:
                places.setdefault(str(problem), where)

        folder = folder_of(self._path)
        for where, entry in read_entries(self._path):
            try:
                question = question_of(entry, defaults, where, folder)
                if check_scorer is not None:
                    references = (question.answer, *question.aug_answers)
                    check_scorer(
                        question.scorer,
                        [reference for reference in references if reference is not None],
                    )
            except ConfigError as problem:
                add_problem(where, problem)
                continue
            num_chars = len(question.query) + len(question.system_prompt)
            if not len(self) or num_chars < self._shortest[0]:
                self._shortest = (num_chars, len(self))
            self._longest = max(self._longest, (num_chars, len(self)))
            self._write(where, question)
            identity = question.id.encode("utf-8", "backslashreplace")
            digests.append(int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest()))
            self._describe(where, entry, question)
        self._spool.flush()
        for place, repeated in self._repeated_ids(digests):
            add_problem(place, repeated)
        if num_problems:
            num_more = num_problems - len(places)
            more = f" (and {num_more} more)" if num_more > 0 else ""
            named = "; ".join(f"{where}: {problem}" for problem, where in places.items())
            raise DatasetError(f"{self._path}: {named}{more}")
        if not len(self):
            raise DatasetError(f"{self._path}: contains no questions")

    def _describe(self, where: str, entry: Mapping[str, Any], question: Question) -> None:
        """Keep what the checks say of a file."""
        self._scorers.add(question.scorer)
        self.has_images = self.has_images or bool(question.images)
        names = question.columns.keys()
        self.common_columns = {*names} & (
            names if self.common_columns is None else self.common_columns
        )
        if not question.read_as:
            self.num_without_scorer += not entry.get("scorer")
            self.unread_keys |= dict.fromkeys(unread_keys(tuple(entry)))
            self.columns_left_out |= dict.fromkeys(left_out(entry, question.columns))
        asked = question.other_request
        if asked is not None:
            schemas = asked, question.answer_schema
            number, first = self.other_requests.get(schemas, (0, where))
            self.other_requests[schemas] = number + 1, first

    def _repeated_ids(self, digests: "array[int]") -> list[tuple[str, str]]:
        """Return the position of every question that repeats an earlier id, and the message."""
        values = np.frombuffer(digests, dtype=np.uint64) if digests else np.empty(0, np.uint64)
        order = np.argsort(values, kind="stable")
        same = np.flatnonzero(values[order][1:] == values[order][:-1])
        suspects = np.unique(np.concatenate([order[same], order[same + 1]]))
        # Two ids may share a digest by chance, so the ids themselves decide.
        first_use: dict[str, str] = {}
        problems = []
        for position in suspects.tolist():
            where, question = self._read(position)
            first_position = first_use.setdefault(question.id, where)
            if first_position != where:
                problems.append((where, f"id {question.id!r} is already used in {first_position}"))
        return problems

    def _write(self, where: str, question: Question) -> None:
        # A tuple of the fields, because pickling the object takes three times as long.
        fields = (where, *vars(question).values())
        packed = pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)
        self._spool.write(packed)
        self._ends.append(self._ends[-1] + len(packed))

    def _read(self, position: int) -> tuple[str, Question]:
        first = range(len(self))[position]  # an IndexError ends the loops of a Sequence
        start, end = self._ends[first : first + 2]
        # Unbuffered: positions are random, and a buffered file would read kilobytes for each.
        where, *fields = pickle.loads(os.pread(self._spool.fileno(), end - start, start))
        return where, Question(*fields)


def load_questions(
    path: Path, defaults: DataSection, check_scorer: ScorerCheck | None = None
) -> list[Question]:
    """Return all questions of a file that fits into memory; see `QuestionFile`."""
    with QuestionFile(path, defaults, check_scorer) as questions:
        return list(questions)

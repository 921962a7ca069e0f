"""Question files to tasks.

A file with a bad entry is refused as a whole, before anything is sampled, with the numbers of its
bad lines.

Files may be far larger than memory: they are read once into a spool on disk, and what stays in
memory is 16 bytes a question.
"""

import hashlib
import pickle
import random
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import numpy as np

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry, read_entries
from agentrl.datasets.question import Question, ScorerCheck, question_of
from agentrl.errors import ConfigError, DatasetError
from agentrl.schema import MCPTask, Split

_NAMED_PROBLEMS = 3


class QuestionFile(Sequence[Question]):
    """The questions of a file, on disk in the order of the file; a context manager.

    Example:
        with QuestionFile(path, config.data, MCPScorerFactory.check_question) as questions:
            print(len(questions), questions.scorers, questions[0].query)
    """

    def __init__(
        self, path: Path, defaults: DataSection, check_scorer: ScorerCheck | None = None
    ) -> None:
        """Read and check the whole file.

        Args:
            path: what `read_entries` takes.
            defaults: scorer, answer schema and system prompt of entries that name none.
            check_scorer: refuses what cannot be scored; None accepts all.

        Raises:
            DatasetError: the file is missing or empty, or entries of it are malformed, cannot be
                scored or repeat an id; the first few are named by line, row or position.
        """
        self._path = path
        self._defaults = defaults
        self._check_scorer = check_scorer
        self._offsets = array("Q")
        self._scorers: set[str] = set()
        self.has_images = False
        """Whether a question shows images."""
        # Nameless, so that nothing is left behind however the process ends.
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    @property
    def scorers(self) -> frozenset[str]:
        """Names of all scorers that the questions want."""
        return frozenset(self._scorers)

    def __len__(self) -> int:
        return len(self._offsets)

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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the disk space back."""
        self._spool.close()

    def _fill(self) -> None:
        problems = _Problems(self._path)
        digests = array("Q")
        for where, entry in read_entries(self._path):
            try:
                question = question_of(entry, self._defaults, where, self._path.parent)
                if self._check_scorer is not None:
                    has_answer = question.answer is not None or bool(question.aug_answers)
                    self._check_scorer(question.scorer, has_answer)
            except (BadEntry, ConfigError) as problem:
                problems.add(where, str(problem))
                continue
            self._offsets.append(self._spool.tell())
            pickle.dump((where, question), self._spool, protocol=pickle.HIGHEST_PROTOCOL)
            digest = hashlib.blake2b(
                question.id.encode("utf-8", "backslashreplace"), digest_size=8
            ).digest()
            digests.append(int.from_bytes(digest))
            self._scorers.add(question.scorer)
            self.has_images = self.has_images or bool(question.images)
        self._find_repeated_ids(digests, problems)
        problems.raise_if_any()
        if not self._offsets:
            raise DatasetError(f"{self._path}: holds no questions")

    def _find_repeated_ids(self, digests: "array[int]", problems: "_Problems") -> None:
        values = np.frombuffer(digests, dtype=np.uint64) if digests else np.empty(0, np.uint64)
        order = np.argsort(values, kind="stable")
        same = np.flatnonzero(values[order][1:] == values[order][:-1])
        suspects = np.unique(np.concatenate([order[same], order[same + 1]]))
        # Two ids may share a digest by chance, so the ids themselves decide.
        first_use: dict[str, str] = {}
        for position in suspects.tolist():
            where, question = self._read(position)
            if question.id in first_use:
                used = first_use[question.id]
                problems.add(where, f"id {question.id!r} was used before, in {used}")
            else:
                first_use[question.id] = where

    def _read(self, position: int) -> tuple[str, Question]:
        self._spool.seek(self._offsets[position])
        found: tuple[str, Question] = pickle.load(self._spool)
        return found


class _Problems:
    """Bad entries: the first few by name, the others by their number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: list[str] = []
        self._count = 0

    def add(self, where: str, problem: str) -> None:
        self._count += 1
        if len(self._named) < _NAMED_PROBLEMS:
            self._named.append(f"{where}: {problem}")

    def raise_if_any(self) -> None:
        if self._count:
            more = self._count - len(self._named)
            text = "; ".join(self._named) + (f" (and {more} more)" if more else "")
            raise DatasetError(f"{self._path}: {text}")


def load_questions(
    path: Path, defaults: DataSection, check_scorer: ScorerCheck | None = None
) -> list[Question]:
    """Return all questions of a file that fits into memory; see `QuestionFile`.

    Raises:
        DatasetError: see `QuestionFile`.
    """
    with QuestionFile(path, defaults, check_scorer) as questions:
        return list(questions)


def tasks_from_questions(
    questions: Sequence[Question],
    split: Split,
    *,
    epochs: Iterable[int] = (0,),
    num_generations: int = 1,
    first_order: int = 0,
    shuffle_seed: int | None = None,
    tag: str = "",
) -> Iterator[MCPTask]:
    """Yield the tasks of some epochs, with ids `{split}/{epoch}/{question id}`.

    Args:
        questions: a `QuestionFile`, or what `load_questions` returned.
        split: split of the tasks.
        epochs: numbers of the epochs; every question is asked once in each.
        num_generations: tries a question.
        first_order: `order` of the first task; the others follow without gaps.
        shuffle_seed: draw each epoch's order with this seed; None keeps the file's order.
        tag: label under which reports group the tasks.
    """
    order = first_order
    for epoch in epochs:
        positions = array("Q", range(len(questions)))
        if shuffle_seed is not None:
            random.Random(f"{shuffle_seed}/{epoch}").shuffle(positions)
        for position in positions:
            question = questions[position]
            yield MCPTask(
                id=f"{split}/{epoch}/{question.id}",
                split=split,
                epoch=epoch,
                order=order,
                num_generations=num_generations,
                tag=tag,
                query=question.query,
                system_prompt=question.system_prompt,
                answer=question.answer,
                aug_answers=question.aug_answers,
                scorer=question.scorer,
                answer_schema=question.answer_schema,
                dataset_id=question.id,
                tags=question.tags,
                images=question.images,
            )
            order += 1


def train_tasks(
    config: DataSection, seed: int, check_scorer: ScorerCheck | None = None
) -> Iterator[MCPTask]:
    """Yield all training tasks of a run, in their order over all epochs; nothing without a file.

    Raises:
        DatasetError: at the first task; see `QuestionFile`.
    """
    if config.train_file is None:
        return
    with QuestionFile(config.train_file, config, check_scorer) as questions:
        yield from tasks_from_questions(
            questions,
            "train",
            epochs=range(config.num_train_epochs),
            num_generations=config.num_generations,
            shuffle_seed=seed if config.shuffle else None,
        )


def eval_tasks(
    config: DataSection, version: int, check_scorer: ScorerCheck | None = None
) -> list[MCPTask]:
    """Return the tasks of an evaluation of policy `version`; their orders overtake training's.

    They are tagged `eval@{version}`, and the version stands in their ids as the epoch.

    Raises:
        DatasetError: see `load_questions`.
    """
    if config.eval_file is None:
        return []
    questions = load_questions(config.eval_file, config, check_scorer)
    return list(
        tasks_from_questions(
            questions,
            "eval",
            epochs=(version,),
            num_generations=config.eval_num_generations,
            first_order=-len(questions),
            tag=f"eval@{version}",
        )
    )

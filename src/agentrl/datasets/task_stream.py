"""Questions to tasks, and tasks into a run's stream.

Training tasks form one stream, which the store numbers by `order` without gaps: samplers are admitted by
that number (`runs.admitted_groups`). Evaluation tasks have negative orders, so they overtake training.
"""

import asyncio
import random
import re
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.datasets.question import Question, ScorerCheck
from agentrl.datasets.question_files import QuestionFile, load_questions
from agentrl.datasets.task_source import task_source
from agentrl.errors import DatasetError
from agentrl.schema import MCPTask, Split, Task
from agentrl.schema.task import id_of_task
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.task_groups import next_batch

_MAX_QUOTED_CHARS = 60
_HELD_OUT_SEED = 1_000_000_007
"""Far from the seeds of training tasks, which environments count up from task to task."""
_RETRY_MARK = "~"
_RETRY = re.compile(rf"(?P<id>.+){_RETRY_MARK}(?P<number>[1-9][0-9]{{0,5}})", re.DOTALL)


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
        questions: a `QuestionFile`, or the list of `load_questions`.
        split: split of the tasks.
        epochs: epoch numbers; each epoch asks every question once.
        num_generations: rollouts of each question.
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
                id=id_of_task(split, epoch, question.id),
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
                columns=dict(question.columns),
            )
            order += 1


def train_tasks(
    config: DataSection, seed: int, check_scorer: ScorerCheck | None = None
) -> Iterator[MCPTask]:
    """Yield all training tasks of a run, in their order over all epochs; nothing without a file."""
    for task in _train_tasks(config, seed, check_scorer):
        yield task.model_copy(update={"rounds": config.rounds}) if config.rounds else task


def _train_tasks(
    config: DataSection, seed: int, check_scorer: ScorerCheck | None
) -> Iterator[MCPTask]:
    stream: dict[str, Any] = {
        "epochs": range(config.num_train_epochs),
        "num_generations": config.num_generations,
        "shuffle_seed": seed if config.shuffle else None,
    }
    if config.env is not None:
        source = task_source(config.env)
        yield from source.tasks(config.env, config, "train", seed=seed, **stream)
    if config.train_file is not None:
        with QuestionFile(config.train_file, config, check_scorer) as questions:
            yield from tasks_from_questions(questions, "train", **stream)


def eval_tasks(
    config: DataSection, version: int, check_scorer: ScorerCheck | None = None
) -> list[MCPTask]:
    """Return the tasks of an evaluation of policy `version`, with negative orders.

    They are tagged `eval@{version}` and have the version as their epoch, also in their ids.
    """
    tag = f"eval@{version}"
    if config.eval_env is not None:
        tasks = list(
            task_source(config.eval_env, "--eval_env").tasks(
                config.eval_env,
                config,
                "eval",
                seed=_HELD_OUT_SEED,
                epochs=(version,),
                num_generations=config.eval_num_generations,
                tag=tag,
            )
        )
        return [task.model_copy(update={"order": task.order - len(tasks)}) for task in tasks]
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
            tag=tag,
        )
    )


async def append_tasks(store: TrajectoryStore, tasks: Iterable[Task]) -> tuple[int, int]:
    """Append training tasks to the end of a run's stream; a known id with another question is refused.

    Returns the number of tasks that were new, and of those that the run had before.
    """
    num_given = 0

    async def checked() -> AsyncIterator[Task]:
        nonlocal num_given
        remaining = iter(tasks)
        previous_batch: dict[str, Task] = {}  # tasks that the store may be writing now
        # In a thread, so that tasks are created while others are written.
        while batch := await asyncio.to_thread(next_batch, remaining):
            num_given += len(batch)
            stored = await store.tasks.get_many([task.id for task in batch])
            known = previous_batch | {task.id: task for task in stored}
            previous_batch = {task.id: task for task in batch}
            for task in batch:
                if (first := known.setdefault(task.id, task)) is not task:
                    _check_same_question(first, task)
                yield task

    num_new = await store.tasks.add(checked())
    return num_new, num_given - num_new


async def check_known_questions(store: TrajectoryStore, tasks: Iterable[Task]) -> None:
    """Refuse tasks under whose ids the run has other questions."""
    given = {task.id: task for task in tasks}
    for known in await store.tasks.get_many([*given]):
        _check_same_question(known, given[known.id])


def _check_same_question(known: Task, task: Task) -> None:
    if not (isinstance(known, MCPTask) and isinstance(task, MCPTask)):
        return
    # The store replaces lone surrogates when it writes text, so compare with the replaced text.
    if known.query != task.query.encode("utf-8", "backslashreplace").decode():
        raise DatasetError(
            f"id {task.dataset_id!r} already belongs to another question of the run, "
            f"{known.query[:_MAX_QUOTED_CHARS]!r}; use unique ids, or another --run_name"
        )


async def retry_dead_letters(store: TrajectoryStore, split: Split | None = None) -> int:
    """Add every question again whose completed group has a dead-lettered (`failed`) record.

    A group completes once and may have been trained on, so it stays unchanged: the question becomes
    a new group `{id}~{n}` at the end of the run's stream (evaluations keep their order). Repeating
    the call adds nothing until a new group has failed as well. Returns the number of added groups.
    """
    return await store.tasks.add(_retries(store, split))


def _retry_id(task_id: str) -> str:
    """Return the id for repeating a question, whose current id may already contain the mark."""
    match = _RETRY.fullmatch(task_id)
    if match is None:
        return f"{task_id}{_RETRY_MARK}1"
    return f"{match['id']}{_RETRY_MARK}{int(match['number']) + 1}"


async def _retries(store: TrajectoryStore, split: Split | None) -> AsyncIterator[Task]:
    failed = [record.task_id async for record in store.records.find(status="failed", split=split)]
    for task_id in dict.fromkeys(failed):
        task = await store.tasks.get(task_id)
        if task is None or task.status != "completed":
            continue  # other records of the group have not ended yet
        new_id = _retry_id(task_id)
        if await store.tasks.get(new_id) is not None:
            continue
        yield task.again(new_id)

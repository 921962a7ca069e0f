"""Tasks of a user's own kind, made as the run comes to need them."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stored import make_task

from agentrl.config.sections import DataSection
from agentrl.datasets.task_feed import TaskFeed
from agentrl.datasets.task_source import generated_tasks
from agentrl.errors import ConfigError
from agentrl.schema import TASK_TYPES, Task
from agentrl.store import TrajectoryStore

MODULE = """
import itertools

from agentrl.rollout import register_task_type
from agentrl.schema import Task


@register_task_type
class SumTask(Task):
    kind = "endless_sum"
    number: int


def train_tasks(seed):
    for number in itertools.count(seed):
        yield SumTask(id=f"train/0/{number}", number=number)
"""


@pytest.fixture(autouse=True)
def _same_kinds_afterwards() -> Iterator[None]:
    before, modules = dict(TASK_TYPES), set(sys.modules)
    yield
    TASK_TYPES.clear()
    TASK_TYPES.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("agentrl_user_"):
            del sys.modules[name]


def section(folder: Path, text: str) -> DataSection:
    path = folder / "mine.py"
    path.write_text(text)
    return DataSection(sampler_module=path, num_generations=3)


async def test_an_endless_source_gives_what_the_run_needs(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    config = section(tmp_path, MODULE)
    feed = TaskFeed(store, generated_tasks(config, seed=5))
    await feed.fill(4)
    await feed.fill(2)
    assert await store.tasks.count() == 4
    # Another process resumes the run: it knows no kind yet, and the source begins anew.
    del TASK_TYPES["endless_sum"]
    for name in [name for name in sys.modules if name.startswith("agentrl_user_")]:
        del sys.modules[name]
    resumed = TaskFeed(store, generated_tasks(config, seed=5))
    await resumed.fill(6)
    tasks = [task async for task in store.tasks.find()]
    assert [(task.order, task.num_generations, task.kind) for task in tasks] == [
        (order, 3, "endless_sum") for order in range(6)
    ]
    assert [task.id for task in tasks] == [f"train/0/{number}" for number in range(5, 11)]


async def test_a_resumed_run_passes_the_tasks_that_it_has_in_few_batches(
    store: TrajectoryStore,
) -> None:
    await TaskFeed(store, map(make_task, itertools.count())).fill(200)
    await store.database.handle.command("profile", 2)
    await TaskFeed(store, map(make_task, itertools.count())).fill(201)
    asked = {"ns": f"{store.database_name}.tasks", "op": "query"}
    assert await store.database["system.profile"].count_documents(asked) < 100
    assert await store.tasks.next_train_order() >= 201


async def test_a_source_that_ends_is_not_asked_again(store: TrajectoryStore) -> None:
    asked = itertools.count()

    def three() -> Iterator[Task]:
        for number in range(3):
            next(asked)
            yield make_task(number)

    feed = TaskFeed(store, three())
    await feed.fill(10)
    await feed.fill(20)
    assert await store.tasks.count() == 3
    assert next(asked) == 3


async def test_tasks_whose_slots_a_crash_left_out_get_them(store: TrajectoryStore) -> None:
    await TaskFeed(store, map(make_task, range(9))).fill(4)
    await store.database["records"].delete_many({"order": {"$gte": 2}})
    await TaskFeed(store, map(make_task, range(9))).fill(4)
    slots = [record.order async for record in store.records.find()]
    assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 / 0", r"mine\.py: ZeroDivisionError"),
        ("def train_tasks(seed):\n    yield {'query': 'q'}", "yielded a dict, not a task"),
        ("def train_tasks(seed):\n    yield 1 / 0", "train_tasks: ZeroDivisionError"),
        ("def train_tasks():\n    return []", "train_tasks: TypeError"),
        ("def train_tasks(seed):\n    return 3", "train_tasks: TypeError"),
    ],
)
def test_a_source_that_fails_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        next(generated_tasks(section(tmp_path, text), seed=0))


def test_a_file_without_tasks_brings_none(tmp_path: Path) -> None:
    assert list(generated_tasks(section(tmp_path, "x = 1"), seed=0)) == []
    assert list(generated_tasks(DataSection(), seed=0)) == []

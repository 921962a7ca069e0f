"""`--sampler_module`: tasks of a user's own kind, made as the run comes to need them.

In: a Python file that registers kinds and samplers. Out: its tasks, and a `TaskFeed` that adds them
ahead of the samplers, so that a source may be endless.
"""

import asyncio
from collections.abc import Iterator
from itertools import islice
from types import ModuleType

from agentrl.config.sections import DataSection
from agentrl.config.user_code import load_user_module
from agentrl.datasets.task_stream import append_tasks
from agentrl.errors import ConfigError
from agentrl.schema import Task
from agentrl.store import TrajectoryStore

_BATCH_SIZE = 1000
_FUNCTION = "train_tasks"


def load_sampler_module(config: DataSection) -> ModuleType | None:
    """Import the file that registers kinds of tasks, so that the store can read them.

    Raises:
        ConfigError: it is missing or fails on import.
    """
    source = config.sampler_module
    return None if source is None else load_user_module(source, f"--sampler_module {source}")


def generated_tasks(config: DataSection, seed: int) -> Iterator[Task]:
    """Yield the training tasks of `--sampler_module`; none where it brings none.

    Raises:
        ConfigError: the file cannot be used, or what it yields is no task.
    """
    module = load_sampler_module(config)
    make = getattr(module, _FUNCTION, None)
    if make is None:
        return
    what = f"--sampler_module {config.sampler_module}: {_FUNCTION}"
    tasks = _made(make, seed, what)
    for task in tasks:
        if not isinstance(task, Task):
            raise ConfigError(f"{what} yielded a {type(task).__name__}, not a task")
        fields: dict[str, object] = {"split": "train"}
        if "num_generations" not in task.model_fields_set:
            fields["num_generations"] = config.num_generations
        yield task.model_copy(update=fields)


def _made(make: object, seed: int, what: str) -> Iterator[object]:
    try:
        yield from make(seed)  # type: ignore[operator]
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


class TaskFeed:
    """Training tasks that join a run ahead of its samplers.

    Args:
        store: of the run.
        tasks: in their order, the same ones at every start; those that the run has stay.
    """

    def __init__(self, store: TrajectoryStore, tasks: Iterator[Task]) -> None:
        self._store = store
        self._tasks = tasks
        self._has_ended = False

    async def fill(self, num_groups: int) -> None:
        """Add tasks until the run has this many groups or more, or none is left.

        Raises:
            ConfigError: see `generated_tasks`.
            StoreError: the store failed.
        """
        size = 1
        while not self._has_ended:
            missing = num_groups - await self._store.tasks.next_train_order()
            if missing <= 0:
                return
            size = min(max(missing, size), _BATCH_SIZE)
            # In a thread: making a task may take time.
            batch = await asyncio.to_thread(list, islice(self._tasks, size))
            self._has_ended = len(batch) < size
            num_new, _ = await append_tasks(self._store, batch)
            # A source begins anew with each process: larger batches pass what the run has sooner.
            size = 1 if num_new else 2 * size

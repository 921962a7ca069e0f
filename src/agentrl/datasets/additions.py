"""Questions for a run that has questions already."""

from collections.abc import AsyncIterator, Iterable
from itertools import islice

from agentrl.errors import DatasetError
from agentrl.schema import MCPTask, Task
from agentrl.store import TrajectoryStore

_AT_A_TIME = 500
_SHOWN_CHARS = 60


async def add_to_stream(store: TrajectoryStore, tasks: Iterable[Task]) -> tuple[int, int]:
    """Store training tasks at the end of a run's stream, in their order.

    Samplers are admitted by position, so an added question must not take the position of one that
    was asked long ago: it would be stale before it is trained on. What is there already keeps its
    place, and no position is left empty.

    Returns:
        The number of tasks that were new, and of those that were there before.

    Raises:
        DatasetError: an id is that of another question of the run.
        StoreError: the store failed.
    """
    num_given = 0

    async def placed() -> AsyncIterator[Task]:
        nonlocal num_given
        order = await store.next_train_order()
        left = iter(tasks)
        while batch := list(islice(left, _AT_A_TIME)):
            num_given += len(batch)
            known = {task.id: task for task in await store.tasks_of([t.id for t in batch])}
            for task in batch:
                if task.id in known:
                    _refuse_other(known[task.id], task)
                    yield known[task.id]
                else:
                    yield task.model_copy(update={"order": order})
                    order += 1

    num_new = await store.add_tasks(placed())
    return num_new, num_given - num_new


def _refuse_other(known: Task, task: Task) -> None:
    if not (isinstance(known, MCPTask) and isinstance(task, MCPTask)):
        return
    # Stored text has no lone surrogates.
    if known.query != task.query.encode("utf-8", "backslashreplace").decode():
        raise DatasetError(
            f"id {task.dataset_id!r} belongs to another question of the run, "
            f"{known.query[:_SHOWN_CHARS]!r}; give the questions ids of their own"
        )

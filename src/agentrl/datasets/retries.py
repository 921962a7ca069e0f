"""Questions whose tries were parked by failures of the infrastructure, asked again."""

from collections.abc import AsyncIterator

from agentrl.schema import Split, Task
from agentrl.store import TrajectoryStore

_MARK = "~"


async def retry_parked(store: TrajectoryStore, split: Split | None = None) -> int:
    """Ask every question again whose group is over but has a parked (`failed`) try.

    A group completes once and may have been trained on since, so it is left as it is: the question
    becomes a new group `{id}~{n}`, at the end of the run's stream (evaluations keep their place
    before it). Calling it again adds nothing until a new group has failed as well.

    Returns:
        The number of groups that were added.
    """
    return await store.add_tasks(_retries(store, split))


async def _retries(store: TrajectoryStore, split: Split | None) -> AsyncIterator[Task]:
    order = await store.next_train_order()
    failed = [record.task_id async for record in store.iter_records(status="failed", split=split)]
    for task_id in dict.fromkeys(failed):
        task = await store.task(task_id)
        if task is None or task.status != "completed":
            continue  # its other tries are still being played
        origin, _, number = task_id.partition(_MARK)
        new_id = f"{origin}{_MARK}{int(number or 0) + 1}"
        if await store.task(new_id) is not None:
            continue
        is_training = task.split == "train"
        yield task.model_copy(
            update={
                "id": new_id,
                "order": order if is_training else task.order,
                "status": "created",
                "completed_at": None,
            }
        )
        order += is_training

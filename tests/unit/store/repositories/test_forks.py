"""Forks beside a run: their documents, and what the run's own operations make of them."""

from support.stored import fill, make_task, make_turn

from agentrl.schema import Fork, Run
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.forks import is_of_fork, new_fork_id


async def test_compaction_and_counts_leave_forks_alone(store: TrajectoryStore) -> None:
    await store.ensure_schema()
    await store.runs.create(Run(name=store.database_name))
    (parent, *_) = await fill(store, 1)
    fork_id = new_fork_id(parent, 0)
    fork = Fork(id=fork_id, record_id=parent, attempt=1, task_id="train/0/q0", turn=0, version=0)
    await store.forked.ensure_schema()
    await store.forks.add(fork)
    task = make_task(0, num_generations=1).model_copy(update={"id": fork_id})
    await store.forked.tasks.add([task])
    claimed = await store.forked.records.claim(
        "me", lease_seconds=60, admitted_groups=1, max_attempts=1, task_id=fork_id
    )
    assert claimed is not None
    record = claimed[0]
    # Long enough for blobs, which forks share with the run.
    message = {"role": "user", "content": "of the fork alone " * 100}
    turn = make_turn(record, 0, messages=[message])
    await store.forked.turns.append(turn, record.fence)
    assert (await store.maintenance.compact()).unreferenced_blobs == 0
    await store.forked.records.release(record.id, record.fence)
    plan = await store.maintenance.compact()
    assert plan.unreferenced_blobs == 0
    (read,) = await store.holding(turn.id).turns.get_many([turn.id])
    assert read.added_messages == (message,)
    assert await store.forks.of_record(record.id) == fork
    assert await store.forks.of_record(parent) is None
    assert (is_of_fork(turn.id), is_of_fork(parent)) == (True, False)
    assert (await store.reports.by_split())["train"].num_groups == 1
    assert (
        await store.records.claim("other", lease_seconds=60, admitted_groups=99, max_attempts=1)
        is None
    )
    assert (await store.groups.reap(1, lease_seconds=60)).num_expired == 0


async def test_a_fork_of_a_fork_names_both(store: TrajectoryStore) -> None:
    first = new_fork_id("train/0/q1/3", 2)
    assert first.startswith("fork:train/0/q1/3@2-")
    assert new_fork_id(f"{first}/0", 1).startswith(f"{first}/0@1-")

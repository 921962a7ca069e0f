"""A run whose groups were trained on, one a step, as a trainer leaves them."""

from support.stored import claim, make_task, play

from agentrl.schema import DBRecordData, Run, TurnTraining
from agentrl.store import TrajectoryStore

NUM_GROUPS = 4


def training_of(data: DBRecordData, step: int) -> TurnTraining:
    return TurnTraining(
        id=f"trainer/{step}/{data.turn_ids[0]}",
        consumer="trainer",
        step=step,
        turn_id=data.turn_ids[0],
        record_id=data.record_id,
        task_id=data.task_id,
        position=data.traj_id,
        num_tokens=7,
        num_trained_tokens=7,
        staleness=0,
    )


async def train(store: TrajectoryStore, step: int) -> str:
    """Train on the next ready group; returns its task."""
    (group,) = await store.ledger.ready_groups(limit=1)
    ids = [data.record_id for data in group]
    await store.ledger.reserve("trainer", ids, step)
    await store.ledger.put_turn_trainings([training_of(data, step) for data in group])
    await store.ledger.commit("trainer", step)
    return group[0].task_id


async def trained_run(store: TrajectoryStore) -> list[str]:
    """A run of one group a step; returns the tasks in the order of the steps."""
    await store.ensure_schema()
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    await store.tasks.add([make_task(number) for number in range(NUM_GROUPS)])
    for _ in range(NUM_GROUPS * 2):
        await play(store, await claim(store), num_turns=2)
    return [await train(store, step) for step in range(1, NUM_GROUPS + 1)]

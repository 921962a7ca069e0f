"""The plans of every query that is sent while a run goes on, also by those who watch it.

The queries are not restated here: the driver is listened to while the store does its work, and the
server is asked to explain what it heard.
"""

from collections.abc import Iterator
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)
from support.stored import claim, fill, make_task, make_turn, play

from agentrl.schema import RecordStatus, Run, Score, ToolResult, TurnTraining, TurnWorth
from agentrl.store import TrajectoryStore

WRITES = {"update": "updates", "delete": "deletes"}
READS = ("find", "findAndModify", "distinct", "aggregate", "count")
READ_WHOLE = {"runs", "samplers", "inference_services", "policies"}
"""Collections so small that they are read whole."""
COUNTS = {"COUNT_SCAN", "RECORD_STORE_FAST_COUNT"}
NOT_EXPLAINED = ("lsid", "txnNumber", "$clusterTime", "$db", "writeConcern", "$readPreference")


class Commands(CommandListener):
    """Keeps every query that was sent, in a form that `explain` takes."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        name = event.command_name
        command = {k: v for k, v in event.command.items() if k not in NOT_EXPLAINED}
        if name in READS:
            self.heard.append(command)
        elif name in WRITES:
            many = WRITES[name]
            self.heard += [{name: command[name], many: [one]} for one in command[many]]

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


def stages(plan: Any) -> Iterator[str]:
    """Names of all stages of a query plan."""
    if isinstance(plan, dict):
        if "stage" in plan:
            yield plan["stage"]
        for key, value in plan.items():
            if key != "rejectedPlans":
                yield from stages(value)
    elif isinstance(plan, list):
        for value in plan:
            yield from stages(value)


def trained(record_id: str) -> TurnTraining:
    """What a step leaves behind about a record's first turn."""
    return TurnTraining(
        id=f"trainer/1/{record_id}/1/0",
        consumer="trainer",
        step=1,
        turn_id=f"{record_id}/1/0",
        record_id=record_id,
        task_id=record_id.rpartition("/")[0],
        num_tokens=7,
        num_trained_tokens=7,
        worth=TurnWorth(after=0.0, change=-0.5, num_leaves=1, is_decision=True),
        staleness=0,
    )


async def sample(store: TrajectoryStore) -> None:
    """Do everything that samplers and scorers do."""
    claimed = await store.records.claim(
        "s", lease_seconds=60, admitted_groups=0, max_attempts=3, splits=["eval"]
    )
    assert claimed is not None
    for _ in range(4):
        await play(store, await claim(store))
    record = await claim(store)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    result = ToolResult(call_id="c", name="lookup", content="4")
    await store.turns.set_tool_results(turn.id, record.id, record.fence, [result])
    await store.records.renew([(record.id, record.fence)], 60)
    await store.records.renew([(record.id, record.fence - 1)], 60)
    await store.records.release(record.id, record.fence)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "no server", 1)
    record = await play(store, await claim(store), score=None)
    await store.scores.postpone(record.id, record.fence, "judge is out", -1)
    scoring = await store.scores.claim("scorer", 60)
    assert scoring is not None
    await store.scores.set(record.id, scoring[0].fence, Score(scorer="exact", value=1.0))
    await store.turns.of_record(record.id, 1)
    await claim(store, lease_seconds=-1)
    assert (await store.groups.reap(3, lease_seconds=60)).num_expired == 1
    await store.tasks.next_train_order()
    statuses: tuple[RecordStatus, ...] = ("pending", "scored")
    for status in statuses:
        async for _ in store.records.find(status=status):
            break


async def train(store: TrajectoryStore, ids: list[str]) -> None:
    """Do everything that trainers do, with the records of two groups."""
    await store.trainer_leases.acquire("trainer", "me", 60)
    await store.ledger.recover("trainer", 0)
    assert len(await store.ledger.ready_groups(limit=2)) == 2
    await store.ledger.reserve("trainer", ids[:3], 1)
    await store.ledger.drop("trainer", ids[3:], 1, "stale")
    await store.ledger.commit("trainer", 1)
    await store.ledger.put_turn_trainings([trained(record_id) for record_id in ids[:3]])
    assert await store.ledger.ready_groups(limit=2, step=5)
    await store.reports.signal(step=1)
    await store.ledger.num_ready_groups("trainer")
    await store.ledger.num_reserved_groups("trainer")
    await store.ledger.is_exhausted()
    await store.tasks.first_open_order()
    await store.reports.progress()
    await store.reports.summary()
    await store.reports.failures()
    await store.reports.missing_scores()
    await store.tasks.count(tag="eval@3", status="completed")
    await store.scores.add(ids[0], Score(scorer="other", value=1.0))
    await store.lineage.of_step(1)
    await store.lineage.of_record(ids[0])
    assert len(await store.lineage.worst_decisions(limit=2)) == 2
    async for _ in store.ledger.find(status="trained", step=1):
        break
    await store.ledger.recover("trainer", 0)


async def expire(store: TrajectoryStore, ids: list[str]) -> None:
    """Do everything that retention does, with the records of two groups."""
    await store.ledger.reserve("trainer", ids, 1)
    await store.ledger.commit("trainer", 1)
    (batch,) = (await store.retention.of_step(1)).batches
    assert await store.retention.expire(batch) == len(ids)
    await store.retention.finish_step(1)
    await store.ledger.recover("trainer", 0)


async def test_hot_queries_scan_no_collection_and_sort_nothing(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.runs.create(Run(name="test"))
    ids = await fill(store, 20)
    await store.tasks.add(make_task(number) for number in range(20, 60))
    await store.tasks.add(make_task(n, split="eval", tag="eval@3") for n in range(2))
    commands = Commands()
    async with AsyncMongoClient[dict[str, Any]](
        mongo_uri, event_listeners=[commands], tz_aware=True
    ) as client:
        listened = TrajectoryStore.from_client(client)
        await sample(listened)
        await train(listened, ids[:4])
        await expire(listened, ids[:4])
    heard = [c for c in commands.heard if next(iter(c.values())) not in READ_WHOLE]
    assert {next(iter(command)) for command in heard} >= {"find", "update", "findAndModify"}
    for command in heard:
        plan = await store.database.handle.command(
            {"explain": command, "verbosity": "queryPlanner"}
        )
        used = set(stages(plan))
        assert "COLLSCAN" not in used, command
        assert "SORT" not in used, command
        assert used & {"IXSCAN", "IDHACK", "DISTINCT_SCAN", "EOF", *COUNTS}, (command, used)

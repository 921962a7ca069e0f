"""Groups that branch: rounds begin in order, once, under concurrency and after crashes."""

import asyncio
from pathlib import Path

import pytest
from support.stored import claim, group_scores, make_task, make_turn, play, read_back

from agentrl.errors import LeaseLost
from agentrl.schema import BranchPoint, MCPTask, Record, Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

GROUP = "train/0/q0"
POINT = BranchPoint(record_id=f"{GROUP}/0", attempt=1, turn=1, rule="random", reason="depth 1")


def tree(number: int = 0, *rounds: int) -> MCPTask:
    rounds = rounds or (2, 2, 1)
    task = make_task(number, num_generations=sum(rounds))
    return task.model_copy(update={"rounds": rounds})


async def statuses(store: TrajectoryStore, task_id: str = GROUP) -> list[tuple[int, str]]:
    return [(one.round, one.status) for one in await store.records.of_task(task_id)]


async def claimed_or_none(store: TrajectoryStore, owner: str = "sampler") -> Record | None:
    found = await store.records.claim(owner, lease_seconds=60, admitted_groups=9, max_attempts=3)
    return None if found is None else found[0]


async def test_a_round_is_claimable_once_all_earlier_ones_have_ended(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([tree()])
    first, second = await claim(store), await claim(store)
    assert await claimed_or_none(store) is None
    await play(store, first)
    assert await claimed_or_none(store, "another") is None
    failed = await store.records.fail_attempt(second.id, second.fence, "no tools", 1)
    assert failed.status == "failed"
    third = await claim(store)
    assert (third.traj_id, third.round) == (2, 1)
    await play(store, third)
    await play(store, await claim(store))
    last = await claim(store)
    assert (last.traj_id, last.round) == (4, 2)
    assert await store.tasks.count(status="completed") == 0
    await play(store, last)
    assert await store.tasks.count(status="completed") == 1
    assert await group_scores(store, GROUP) == [1.0, None, 1.0, 1.0, 1.0]


async def test_the_next_group_is_claimed_while_a_round_is_awaited(store: TrajectoryStore) -> None:
    await store.tasks.add([tree(0), tree(1)])
    held = [await claim(store) for _ in range(4)]
    assert [one.order for one in held] == [0, 0, 1, 1]
    for record in held[:2]:
        await play(store, record)
    assert (await claim(store)).id == f"{GROUP}/2"


async def test_many_samplers_begin_every_round_once(store: TrajectoryStore, mongo_uri: str) -> None:
    await store.tasks.add([tree(number, 4, 4, 4) for number in range(3)])
    begun: list[tuple[str, int]] = []

    async def sample(name: str) -> None:
        async with TrajectoryStore.connect(mongo_uri) as own:
            idle = 0
            while idle < 40:
                record = await claimed_or_none(own, name)
                if record is None:
                    idle += 1
                    await asyncio.sleep(0.05)
                    continue
                idle = 0
                earlier = await own.records.of_task(record.task_id)
                assert all(one.status == "scored" for one in earlier if one.round < record.round)
                begun.append((record.id, record.attempt))
                await play(own, record)

    await asyncio.gather(*(sample(f"sampler{number}") for number in range(4)))
    assert sorted(begun) == sorted(
        (f"train/0/q{number}/{slot}", 1) for number in range(3) for slot in range(12)
    )
    assert await store.tasks.count(status="completed") == 3


async def test_a_round_whose_beginning_a_crash_interrupted_is_begun_by_the_reaper(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([tree()])
    for record in [await claim(store), await claim(store)]:
        await play(store, record)
    records = store.database["records"]
    # As if the process had died after the write that ended the last Record of the round.
    await records.update_many({"task_id": GROUP, "round": 1}, {"$set": {"status": "planned"}})
    assert await claimed_or_none(store) is None
    await store.groups.reap(3, lease_seconds=60)
    assert await statuses(store) == [
        *((0, "scored"), (0, "scored"), (1, "pending"), (1, "pending"), (2, "planned"))
    ]
    # As if it had died in the middle of the write.
    await records.update_one({"_id": f"{GROUP}/3"}, {"$set": {"status": "planned"}})
    third = await claim(store)
    await store.groups.reap(3, lease_seconds=60)
    assert (await read_back(store, third)).status == "running"
    assert (await claim(store)).traj_id == 3


async def test_a_branch_is_chosen_under_the_fence_and_kept_by_later_attempts(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([tree(0, 1, 1)])
    await play(store, await claim(store))
    dead = await claim(store)
    chosen = await store.records.choose_branch(dead.id, dead.fence, POINT)
    assert (chosen.branch, chosen.fence) == (POINT, dead.fence)
    await store.records.release(dead.id, dead.fence)
    heir = await claim(store, "another")
    assert heir.branch == POINT
    with pytest.raises(LeaseLost):
        await store.records.choose_branch(dead.id, dead.fence, None, "late")
    await play(store, heir)
    [(_, data)] = await store.ledger.ready_groups("trainer", split="train", limit=1, step=1)
    assert data.branch == POINT


async def test_a_closed_branch_counts_as_no_failed_attempt_and_is_played_from_the_question(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([tree(0, 1, 1)])
    await play(store, await claim(store))
    # Tools without state: another attempt would be taken up behind its last turn.
    record = await claim(store, max_attempts=1, resumable=True)
    await store.records.choose_branch(record.id, record.fence, POINT)
    await store.turns.append(make_turn(record, 0), record.fence)
    await store.records.close_branch(record.id, record.fence, "the replay differs")
    again = await claim(store, max_attempts=1, resumable=True)
    assert (again.branch, again.no_branch) == (None, "the replay differs")
    assert (again.attempt, again.turns) == (2, ())
    assert [one.ended_by for one in again.attempts] == ["released", None]


async def test_groups_of_earlier_versions_load_and_complete(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    added = {"round": "", "branch": "", "no_branch": ""}
    await store.database["records"].update_many({}, {"$unset": added})
    await store.database["tasks"].update_many({}, {"$unset": {"rounds": ""}})
    for record in [await claim(store), await claim(store)]:
        assert (record.round, record.branch, record.no_branch) == (0, None, "")
        await play(store, record)
    assert await store.tasks.count(status="completed") == 1


async def test_an_import_goes_on_with_the_rounds_of_the_exported_run(
    store: TrajectoryStore, mongod: EmbeddedMongo, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([tree(0, 1, 1, 1)])
    await play(store, await claim(store))
    branch = await claim(store)
    await store.records.choose_branch(branch.id, branch.fence, POINT)
    await store.records.release(branch.id, branch.fence)
    await store.transfer.export_run(tmp_path / "export")
    async with TrajectoryStore.connect(mongod.uri(), f"{store.database_name}_copy") as copy:
        await copy.transfer.import_run(tmp_path / "export")
        assert await statuses(copy) == [(0, "scored"), (1, "pending"), (2, "planned")]
        continued = await claim(copy)
        assert continued.branch == POINT
        await play(copy, continued)
        assert await statuses(copy) == [(0, "scored"), (1, "scored"), (2, "pending")]
        await copy.drop_database()

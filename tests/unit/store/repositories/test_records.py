"""Claims, leases, fencing."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stored import claim, group_scores, make_task, make_turn, play, read_back

from agentrl.errors import LeaseLost
from agentrl.schema import RECORD_TRANSITIONS, Record, Score, ToolCall, ToolResult
from agentrl.store import TrajectoryStore

REPEATS = 40


@pytest.fixture(scope="module")
def fleet() -> Iterator[list["subprocess.Popen[str]"]]:
    """Eight real processes that wait for commands."""
    worker = Path(__file__).with_name("worker.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    yield workers
    for process in workers:
        process.communicate(timeout=20)
        assert process.returncode == 0


def order(fleet: list["subprocess.Popen[str]"], command: str) -> list[list[str]]:
    """Give all processes the same command at the same moment; return what each answers."""
    send(fleet, command)
    return [json.loads(answer(process)) for process in fleet]


def send(fleet: list["subprocess.Popen[str]"], line: str) -> None:
    """Write a line to all processes at the same moment."""
    for process in fleet:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    return answer(process) if line == '"ready"\n' else line


async def expire(store: TrajectoryStore, record_id: str) -> None:
    """Move the end of a lease into the past, as if its holder had been silent for long."""
    await store.database["records"].update_one(
        {"_id": record_id}, [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}]
    )


async def test_eight_processes_claim_every_slot_exactly_once(
    store: TrajectoryStore, mongo_uri: str, fleet: list["subprocess.Popen[str]"]
) -> None:
    await store.tasks.add(make_task(number, num_generations=4) for number in range(100))
    claimed = order(fleet, f"claim {mongo_uri}")
    counts = Counter(record_id for ids in claimed for record_id in ids)
    assert len(counts) == 400
    assert set(counts.values()) == {1}
    assert sum(bool(ids) for ids in claimed) > 1, "no race took place"


async def test_eight_processes_finishing_one_group_together_complete_it_once(
    store: TrajectoryStore, mongo_uri: str, fleet: list["subprocess.Popen[str]"]
) -> None:
    task_ids = [f"train/0/q{number}" for number in range(REPEATS)]
    await store.tasks.add(make_task(number, num_generations=8) for number in range(REPEATS))
    send(fleet, f"score {mongo_uri}")
    for task_id in task_ids:
        assert [json.loads(answer(process)) for process in fleet] == [task_id] * 8
        send(fleet, "now")
    won = [json.loads(answer(process)) for process in fleet]
    assert sorted(task_id for ids in won for task_id in ids) == sorted(task_ids)
    assert sum(bool(ids) for ids in won) > 1, "no race took place"
    for task_id in task_ids:
        assert await group_scores(store, task_id) == [float(n) for n in range(8)]
    assert await store.tasks.count(status="completed") == REPEATS
    groups = await store.ledger.ready_groups(limit=REPEATS, hydrate=False)
    assert [len(group) for group in groups] == [8] * REPEATS


async def test_slots_are_claimed_in_order_and_evaluation_overtakes(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(1), make_task(0), make_task(3, split="eval")])
    # What was stored first comes behind the other: the order decides.
    await store.database["records"].update_many({"task_id": "train/0/q1"}, {"$set": {"order": 2}})
    claimed = [(await claim(store)).id for _ in range(6)]
    assert claimed == [
        f"{task}/{n}" for task in ("eval/0/q3", "train/0/q0", "train/0/q1") for n in (0, 1)
    ]


async def test_only_admitted_groups_and_wanted_splits_are_claimed(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1), make_task(1, num_generations=1)])
    await store.tasks.add([make_task(0, split="eval", num_generations=1)])

    async def next_id(admitted_groups: int, splits: tuple[str, ...] | None = None) -> str | None:
        claimed = await store.records.claim(
            "s",
            lease_seconds=60,
            admitted_groups=admitted_groups,
            max_attempts=3,
            splits=splits,  # type: ignore[arg-type]
        )
        return claimed[0].id if claimed else None

    assert await next_id(0, ("train",)) is None
    assert await next_id(1, ("train",)) == "train/0/q0/0"
    assert await next_id(1) == "eval/0/q0/0"
    assert await next_id(1) is None
    assert await next_id(2) == "train/0/q1/0"


async def test_a_claim_carries_lease_attempt_and_task(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(7)])
    claimed = await store.records.claim(
        "host:1:abc", lease_seconds=60, admitted_groups=99, max_attempts=3
    )
    assert claimed is not None
    record, task = claimed
    assert task == make_task(7).model_copy(update={"created_at": task.created_at, "order": 0})
    assert (record.status, record.attempt, record.fence) == ("running", 1, 1)
    assert record.lease is not None
    assert (record.lease.owner, record.lease.fence) == ("host:1:abc", 1)
    assert record.started_at is not None
    assert 59 <= (record.lease.expires_at - record.started_at).total_seconds() <= 61
    assert [(a.attempt, a.owner, a.ended_by) for a in record.attempts] == [(1, "host:1:abc", None)]


@pytest.mark.parametrize("how", ["expired", "released", "error"])
async def test_a_stale_holder_changes_nothing(store: TrajectoryStore, how: str) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    stale = await claim(store, "stale")
    first_turn = make_turn(stale, 0)
    await store.turns.append(first_turn, stale.fence)
    if how == "expired":
        await expire(store, stale.id)
    elif how == "released":
        await store.records.release(stale.id, stale.fence)
    else:
        await store.records.fail_attempt(stale.id, stale.fence, "no server", 3)
    holder = await claim(store, "holder")
    assert (holder.id, holder.attempt, holder.fence) == (stale.id, 2, 2)
    await assert_refused_everything(store, stale, first_turn.id)
    assert await store.records.get(stale.id) == holder
    await play(store, holder)
    with pytest.raises(LeaseLost, match=stale.id):
        await store.scores.set(stale.id, stale.fence, Score(scorer="exact", value=0.0))
    assert [turn.id for turn in await store.turns.of_record(stale.id, attempt=1)] == [first_turn.id]
    assert [turn.attempt for turn in await store.turns.of_record(stale.id)] == [2]


async def assert_refused_everything(store: TrajectoryStore, stale: Record, turn_id: str) -> None:
    before = await store.records.get(stale.id)
    turns = await store.database["turns"].find().to_list()
    score = Score(scorer="exact", value=0.0)
    results = [ToolResult(call_id="c", name="lookup", content="4")]
    key = (stale.id, stale.fence)
    writes = [
        store.turns.append(make_turn(stale, 1), stale.fence),
        store.turns.set_tool_results(turn_id, *key, results),
        store.turns.set_rewards({turn_id: 1.0}, *key),
        store.records.finish(*key, outcome="answered", final_answer="no", lease_seconds=60),
        store.scores.set(*key, score),
        store.scores.postpone(*key, "judge is out", 1),
        store.records.release(*key),
        store.records.fail_attempt(*key, "no server", 1),
    ]
    for write in writes:
        with pytest.raises(LeaseLost, match=stale.id):
            await write
    assert await store.records.renew([key], 1000) == {stale.id}
    assert await store.records.get(stale.id) == before
    assert await store.database["turns"].find().to_list() == turns


async def test_heartbeats_keep_leases_and_name_the_lost_ones(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=3)])
    kept, lost, done = [await claim(store, lease_seconds=1) for _ in range(3)]
    await store.records.release(lost.id, lost.fence)
    await play(store, done)
    leases = [(one.id, one.fence) for one in (kept, lost, done)]
    assert await store.records.renew(leases, 600) == {lost.id}
    after = await store.records.get(kept.id)
    assert after is not None
    assert after.lease is not None
    assert kept.lease is not None
    assert (after.lease.expires_at - kept.lease.expires_at).total_seconds() > 500
    assert await store.records.renew([], 600) == set()


async def test_an_expired_slot_is_claimed_again_and_parked_after_max_attempts(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    sibling = await claim(store)
    for attempt in (1, 2):
        record = await claim(store, f"sampler-{attempt}", max_attempts=2)
        assert (record.traj_id, record.attempt) == (1, attempt)
        await expire(store, record.id)
    counts = await store.groups.reap(2, lease_seconds=60)
    assert (counts.num_expired, counts.num_groups_completed) == (1, 0)
    parked = await store.records.get("train/0/q0/1")
    assert parked is not None
    assert parked.status == "failed"
    assert parked.error == "the lease of sampler-2 expired"
    assert [(a.owner, a.ended_by) for a in parked.attempts] == [
        ("sampler-1", "expired"),
        ("sampler-2", "expired"),
    ]
    await play(store, sibling)
    (group,) = await store.ledger.ready_groups(limit=1)
    assert [(data.score is None, data.outcome) for data in group] == [
        (False, "answered"),
        (True, None),
    ]


async def test_a_process_that_has_just_started_judges_no_lease(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    running, finished = [await claim(store, f"elsewhere:{pid}:0-a") for pid in (1, 2)]
    await store.records.finish(
        finished.id, finished.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    for record in (running, finished):
        await expire(store, record.id)
    store.clock.beat()
    assert (await store.groups.reap(1, lease_seconds=60)).num_expired == 0
    assert await store.scores.claim("scorer", 60) is None
    other = TrajectoryStore.from_client(store.database.client, store.database_name)
    assert await other.scores.claim("scorer", 60) is not None
    assert (await other.groups.reap(1, lease_seconds=60)).num_expired == 1


async def test_a_renewed_lease_is_not_reaped(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    assert (await store.groups.reap(1, lease_seconds=60)).num_expired == 0
    current = await store.records.get(record.id)
    assert current is not None
    assert current.status == "running"


async def test_handing_back_is_not_counted_as_a_failed_attempt(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    for _ in range(3):
        record = await claim(store, max_attempts=2)
        await store.records.release(record.id, record.fence)
    record = await claim(store, max_attempts=2)
    assert record.attempt == 4
    assert [a.ended_by for a in record.attempts] == ["released"] * 3 + [None]
    again = await store.records.fail_attempt(record.id, record.fence, "no server", 2)
    assert again.status == "pending"
    record = await claim(store, max_attempts=2)
    parked = await store.records.fail_attempt(record.id, record.fence, "no $server", 2)
    assert (parked.status, parked.error) == ("failed", "no $server")
    assert [task.status async for task in store.tasks.find()] == ["completed"]


async def test_a_new_attempt_starts_with_clean_counters(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store)
    calls = [
        ToolCall(id="c0", name="lookup"),
        ToolCall(id="c1", name="lookup", format_error="no JSON"),
    ]
    await store.turns.append(make_turn(record, 0, version=3, tool_calls=calls), record.fence)
    of_another_model = make_turn(record, 1, version=1).model_copy(update={"trainable": False})
    await store.turns.append(of_another_model, record.fence)
    played = await read_back(store, record)
    assert (played.num_prompt_tokens, played.num_output_tokens) == (200, 14)
    assert (played.min_version, played.max_version) == (3, 3)
    assert (played.num_tool_calls, played.tool_names) == (1, ("lookup",))
    await store.records.release(record.id, record.fence)
    record = await claim(store)
    assert (record.turns, record.num_prompt_tokens, record.num_output_tokens) == ((), 0, 0)
    assert (record.num_tool_calls, record.tool_names) == (0, ())
    assert (record.min_version, record.max_version) == (None, None)


async def test_records_move_only_along_the_transition_table(store: TrajectoryStore) -> None:
    score = Score(scorer="exact", value=1.0)
    for start in RECORD_TRANSITIONS:
        number = await store.tasks.next_train_order()
        await store.tasks.add([make_task(number, num_generations=1)])
        record = await claim(store)
        await store.database["records"].update_one({"_id": record.id}, {"$set": {"status": start}})
        key = (record.id, record.fence)
        moves = {
            "finished": store.records.finish(
                *key, outcome="answered", final_answer="", lease_seconds=60
            ),
            "scored": store.scores.set(*key, score),
            "failed": store.records.fail_attempt(*key, "x", 1),
        }
        for target, move in moves.items():
            current = await store.records.get(record.id)
            assert current is not None
            if target in RECORD_TRANSITIONS[current.status] or target == current.status != "failed":
                await move
            else:
                with pytest.raises(LeaseLost):
                    await move

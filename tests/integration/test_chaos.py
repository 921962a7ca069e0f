"""A real run under a few kill -9s; `scripts/chaos` plays as many as one likes."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import RunKind, run_chaos
from chaos.journal import Journal
from chaos.plan import ELECTIONS, EVERYTHING, PROCESSES, Kind, plan
from chaos.sampler import digest
from chaos.verdict import MUST_BE_ZERO, Verdict, check_faults, judge
from support.stored import fill

from agentrl.schema import BranchPoint, Run
from agentrl.store import TrajectoryStore

SEED = 20
FAULTS = 8


@pytest.mark.slow
async def test_kills_of_every_kind_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    outcome = await run_chaos(
        tmp_path, faults=FAULTS, seed=SEED, pause_seconds=(0.2, 0.8), settle_seconds=150
    )
    found = outcome.verdict
    assert set(outcome.faults) == set(PROCESSES)
    assert outcome.unexpected_exits == []
    assert found.examples == []
    assert [getattr(found, name) for name in MUST_BE_ZERO] == [0] * len(MUST_BE_ZERO)
    assert found.num_steps > 0
    assert found.num_turns > 100
    assert found.num_attempts_lost > 0
    assert found.num_expired > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_kills_in_a_run_that_branches_leave_no_branch_behind(tmp_path: Path) -> None:
    outcome = await run_chaos(
        tmp_path, faults=FAULTS, seed=SEED, pause_seconds=(0.2, 0.8), kind=RunKind("tree")
    )
    assert outcome.unexpected_exits == []
    assert outcome.verdict.examples == []
    assert outcome.verdict.num_branches > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("weights", [EVERYTHING, ELECTIONS], ids=["everything", "elections"])
async def test_faults_of_every_kind_lose_nothing_and_do_nothing_twice(
    tmp_path: Path, weights: Mapping[Kind, int]
) -> None:
    outcome = await run_chaos(tmp_path, faults=len(weights), seed=SEED, weights=weights)
    assert {*outcome.faults, *(one.partition(":")[0] for one in outcome.not_played)} == set(weights)
    assert outcome.unexpected_exits == []
    assert outcome.verdict.examples == []


def test_the_seed_replays_the_faults() -> None:
    assert plan(50, 7, (0.1, 2.0), EVERYTHING) == plan(50, 7, (0.1, 2.0), EVERYTHING)
    assert plan(50, 7, (0.1, 2.0), EVERYTHING) != plan(50, 8, (0.1, 2.0), EVERYTHING)
    assert {one.kind for one in plan(len(EVERYTHING), 7, (0.1, 2.0), EVERYTHING)} == set(EVERYTHING)


async def drop_one_without_a_score(store: TrajectoryStore, *_: Journal) -> None:
    reason = {"ledger.trainer.reason": "no_score"}
    await store.database["record_data"].update_one({"_id": "train/0/q2/1"}, {"$set": reason})


Spoil = Callable[[TrajectoryStore, Journal, Journal], Awaitable[Any]]


async def nothing(*_: object) -> None:
    pass


async def lose_a_turn(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["turns"].delete_one({"record_id": "train/0/q0/0"})


async def cut_a_turn_out(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["records"].update_one({"_id": "train/0/q0/0"}, {"$set": {"turns": []}})


async def train_one_again(_: TrajectoryStore, __: Journal, trainer: Journal) -> None:
    trainer.write("step", step=2, records=["train/0/q0/0"])


async def forget_that_one_was_trained(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["record_data"].update_one(
        {"_id": "train/0/q0/0"}, {"$set": {"ledger": {}}}
    )


async def pass_one_over(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["record_data"].update_one(
        {"_id": "train/0/q2/1"}, {"$set": {"ledger": {}}}
    )


async def call_a_dropped_one_trained(store: TrajectoryStore, *_: Journal) -> None:
    standing = {"ledger.trainer.status": "trained", "ledger.trainer.trained_at": [1]}
    await store.database["record_data"].update_one({"_id": "train/0/q2/1"}, {"$set": standing})


async def leave_a_group_open(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["tasks"].update_one({"_id": "train/0/q1"}, {"$set": {"status": "created"}})


async def write_as_a_stale_holder(_: TrajectoryStore, samplers: Journal, __: Journal) -> None:
    samplers.write("claim", record="train/0/q0/0", fence=2, owner="other")
    samplers.write("set_score", record="train/0/q0/0", fence=1, begun=float("inf"))


async def train_an_old_one(store: TrajectoryStore, _: Journal, trainer: Journal) -> None:
    await store.database["records"].update_one(
        {"_id": "train/0/q0/0"}, {"$set": {"min_version": -5}}
    )


async def book_a_live_holders_attempt(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["records"].update_one(
        {"_id": "train/0/q0/0"}, {"$set": {"attempts.0.ended_by": "expired"}}
    )


async def miscount(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["records"].update_one(
        {"_id": "train/0/q0/0"}, {"$set": {"group_open": True}}
    )


async def grant_a_lease_twice(_: TrajectoryStore, samplers: Journal, __: Journal) -> None:
    samplers.write("claim", record="train/0/q0/0", fence=1, owner="other")


async def forget_a_choice(store: TrajectoryStore, *_: Journal) -> None:
    await store.database["records"].update_one({"_id": "train/0/q0/1"}, {"$set": {"round": 1}})


async def leave_a_parent_at_a_turn_it_lacks(store: TrajectoryStore, *_: Journal) -> None:
    point = BranchPoint(record_id="train/0/q0/0", attempt=1, turn=1, rule="random")
    branched = {"round": 1, "branch": point.model_dump()}
    await store.database["records"].update_one({"_id": "train/0/q0/1"}, {"$set": branched})


async def begin_a_round_early(store: TrajectoryStore, samplers: Journal, _: Journal) -> None:
    chain = {"round": 1, "no_branch": "random: it has no turn 1 to leave"}
    await store.database["records"].update_one({"_id": "train/0/q0/1"}, {"$set": chain})
    samplers.write("set_score", record="train/0/q0/0", fence=1, begun=float("inf"))


TAKING_ONE_DROPPED = (pass_one_over, call_a_dropped_one_trained, drop_one_without_a_score)


async def expire_one(store: TrajectoryStore, *_: Journal) -> None:
    await store.retention.expire(["train/0/q1"])


async def expire_one_that_was_not_consumed(store: TrajectoryStore, *_: Journal) -> None:
    await expire_one(store)
    reserved = {"ledger.trainer.status": "reserved"}
    await store.database["record_data"].update_one({"_id": "train/0/q1/0"}, {"$set": reserved})


async def expire_one_of_a_late_step(store: TrajectoryStore, *_: Journal) -> None:
    await expire_one(store)
    late = {"ledger.trainer.step": 2}
    await store.database["record_data"].update_one({"_id": "train/0/q1/0"}, {"$set": late})


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (nothing, None),
        (lose_a_turn, "lost_turns"),
        (cut_a_turn_out, "lost_turns"),
        (train_one_again, "double_trained"),
        (forget_that_one_was_trained, "double_trained"),
        (pass_one_over, "skipped"),
        (call_a_dropped_one_trained, "skipped"),
        (leave_a_group_open, "incomplete_groups wrong_counts"),
        (write_as_a_stale_holder, "fencing_violations"),
        (grant_a_lease_twice, "fencing_violations"),
        (train_an_old_one, "trained_stale"),
        (book_a_live_holders_attempt, "attempts_booked_wrongly"),
        (miscount, "wrong_counts"),
        (forget_a_choice, "broken_branches"),
        (leave_a_parent_at_a_turn_it_lacks, "broken_branches"),
        (begin_a_round_early, "broken_branches"),
        (drop_one_without_a_score, "lost_scores"),
        (expire_one, None),
        (expire_one_that_was_not_consumed, "double_trained expired_early"),
        (expire_one_of_a_late_step, "expired_early"),
    ],
)
async def test_the_judge_finds_whatever_went_wrong(
    store: TrajectoryStore, tmp_path: Path, spoil: Spoil, kind: str | None
) -> None:
    verdict = await judged(store, tmp_path, spoil)
    assert [name for name in MUST_BE_ZERO if getattr(verdict, name)] == (kind or "").split()
    assert verdict.dropped["stale"] == (1 if spoil in TAKING_ONE_DROPPED else 2)
    is_expired = spoil is expire_one or "expired_early" in (kind or "")
    assert verdict.num_expired == (2 if is_expired else 0)


async def judged(store: TrajectoryStore, tmp_path: Path, spoil: Spoil) -> Verdict:
    """Return the verdict on a run of three groups, of which two were trained, and that was spoilt."""
    samplers, trainer = Journal(tmp_path / "samplers.jsonl"), Journal(tmp_path / "trainer.jsonl")
    await store.runs.create(Run(name=store.database_name))
    ids = await fill(store, 3)
    for record_id in ids:
        (turn,) = await store.turns.of_record(record_id)
        samplers.write("claim", record=record_id, fence=1, owner="one")
        facts = {"record": record_id, "fence": 1, "attempt": 1, "begun": 0.0}
        facts |= {"index": turn.index, "version": turn.version_spans[0].version}
        samplers.write("turn", id=turn.id, digest=digest(turn), **facts)
    await store.ledger.reserve("trainer", ids[:4], 1)
    await store.ledger.drop("trainer", ids[4:], 1, "stale")
    await store.ledger.commit("trainer", 1)
    trainer.write("resume", step=0)
    trainer.write("step", step=1, records=ids[:4])
    await spoil(store, samplers, trainer)
    trainer.write("step", step=3, records=[])
    return await judge(store, tmp_path, max_staleness=4, retain_steps=2)


def fault(kind: str, **facts: Any) -> dict[str, Any]:
    return {"fault": kind, "victim": "x", "how": "", "began": 0.0, "ended": 1.0e12, **facts}


CHECKPOINT = fault("checkpoint", damaged="000006", intact=3, file="state.json", started=0.0)
STOP = fault("stop", status=0, said="ended")
MEMORY = fault("memory", is_recovered=True, log_bytes=100)
EXPORT = fault("export", is_refused=True, left_behind=[], differing=[])


@pytest.mark.parametrize(
    ("noted", "resumed", "kind"),
    [
        (CHECKPOINT, 3, None),
        (CHECKPOINT, 6, "wrong_resumes"),
        (CHECKPOINT, 0, "wrong_resumes"),
        ({**CHECKPOINT, "damaged": "000009"}, 3, "wrong_resumes"),
        (STOP, 0, None),
        ({**STOP, "status": None}, 0, "unclean_stops"),
        ({**STOP, "status": -15}, 0, "unclean_stops"),
        (MEMORY, 0, None),
        ({**MEMORY, "is_recovered": False}, 0, "engine_failures"),
        ({**MEMORY, "log_bytes": 2 << 20}, 0, "engine_failures"),
        (EXPORT, 0, None),
        ({**EXPORT, "is_refused": False}, 0, "broken_copies"),
        ({**EXPORT, "left_behind": ["tasks"]}, 0, "broken_copies"),
        ({**EXPORT, "differing": ["turns"]}, 0, "broken_copies"),
        (fault("control", how="temperature"), 0, "claims_under_bad_controls"),
        (fault("control", how="scorer", ended=0.0), 0, None),
    ],
)
def test_the_judge_finds_what_a_fault_left(
    tmp_path: Path, noted: dict[str, Any], resumed: int, kind: str | None
) -> None:
    (tmp_path / "output" / "checkpoints" / "000006.damaged").mkdir(parents=True)
    resume = {"kind": "resume", "at": 1.0, "step": resumed}
    claim = {"kind": "claim", "at": 100.0, "record": "train/0/q0/0", "owner": "host:7:1"}
    verdict = Verdict()
    check_faults([{"kind": "fault", **noted}], [claim], [resume], tmp_path, verdict)
    assert [name for name in MUST_BE_ZERO if getattr(verdict, name)] == [kind] * (kind is not None)

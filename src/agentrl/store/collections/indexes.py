"""Indexes, each beside the query that it serves."""

from pymongo import ASCENDING as UP
from pymongo import IndexModel

INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # tasks.next_train_order, tasks.find
        IndexModel([("split", UP), ("order", UP)], name="by_order"),
        # tasks.count, reports.progress
        IndexModel([("split", UP), ("status", UP)], name="by_status"),
        # tasks.count(tag=...): only tasks that carry a tag
        IndexModel(
            [("tag", UP), ("status", UP)],
            name="by_tag",
            partialFilterExpression={"tag": {"$gt": ""}},
        ),
    ],
    "records": [
        # records.claim: the filter and the sort in one; reports.progress counts over it
        IndexModel([("status", UP), ("order", UP), ("traj_id", UP)], name="claimable"),
        # groups.reap, records.claim, scores.claim
        IndexModel([("status", UP), ("lease.expires_at", UP)], name="leases"),
        # groups.complete, records.of_task
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
        # groups.reap: terminal records of groups that nobody has completed yet
        IndexModel(
            [("status", UP), ("task_id", UP)],
            name="open_groups",
            partialFilterExpression={"group_open": True},
        ),
    ],
    "turns": [
        # turns.of_record, and people who look for the turns of a record
        IndexModel([("record_id", UP), ("attempt", UP), ("index", UP)], name="by_attempt"),
    ],
    "record_data": [
        # groups.complete, and whole groups for ledger.ready_groups
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
    ],
    "turn_training": [
        # lineage.of_step, ledger.recover
        IndexModel([("consumer", UP), ("step", UP)], name="by_step"),
        # lineage.of_record, and people who look for a turn
        IndexModel([("record_id", UP), ("turn_id", UP), ("step", UP)], name="by_turn"),
    ],
}


def ledger_indexes(consumer: str) -> list[IndexModel]:
    """Return the indexes of `record_data` that serve one trainer."""
    status = f"ledger.{consumer}.status"
    return [
        # ledger.ready_groups: in order, without a sort
        IndexModel(
            [("split", UP), ("group_completed", UP), (status, UP), ("order", UP), ("traj_id", UP)],
            name=f"ready_{consumer}",
        ),
        # ledger.commit, ledger.recover
        IndexModel([(status, UP), (f"ledger.{consumer}.step", UP)], name=f"steps_{consumer}"),
        # lineage.of_step
        IndexModel([(f"ledger.{consumer}.trained_at", UP)], name=f"trained_at_{consumer}"),
        # ledger.num_consumed_groups
        IndexModel([("traj_id", UP), ("split", UP), (status, UP)], name=f"consumed_{consumer}"),
    ]

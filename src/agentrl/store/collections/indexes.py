"""Indexes, each beside the query that it serves."""

from pymongo import ASCENDING as UP
from pymongo import IndexModel

INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # next_train_order, iter_tasks
        IndexModel([("split", UP), ("order", UP)], name="by_order"),
        # count_tasks, progress
        IndexModel([("split", UP), ("status", UP)], name="by_status"),
        # tag_scores, count_tasks(tag=...): only tasks that carry a tag
        IndexModel(
            [("tag", UP), ("status", UP)],
            name="by_tag",
            partialFilterExpression={"tag": {"$gt": ""}},
        ),
    ],
    "records": [
        # claim_record: the filter and the sort in one; progress counts over it
        IndexModel([("status", UP), ("order", UP), ("traj_id", UP)], name="claimable"),
        # reap, claim_record, claim_scoring
        IndexModel([("status", UP), ("lease.expires_at", UP)], name="leases"),
        # complete_group, records_of, scores
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
        # reap: terminal records of groups that nobody has completed yet
        IndexModel(
            [("status", UP), ("task_id", UP)],
            name="open_groups",
            partialFilterExpression={"group_open": True},
        ),
    ],
    "turns": [
        # turns_of, and people who look for the turns of a record
        IndexModel([("record_id", UP), ("attempt", UP), ("index", UP)], name="by_attempt"),
    ],
    "record_data": [
        # complete_group, and whole groups for the trainer
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
    ],
    "turn_training": [
        # step_lineage, recover
        IndexModel([("consumer", UP), ("step", UP)], name="by_step"),
        # record_lineage, and people who look for a turn
        IndexModel([("record_id", UP), ("turn_id", UP), ("step", UP)], name="by_turn"),
    ],
}


def ledger_indexes(consumer: str) -> list[IndexModel]:
    """Return the indexes of `record_data` that serve one trainer."""
    status = f"ledger.{consumer}.status"
    return [
        # ready_groups: in order, without a sort
        IndexModel(
            [("split", UP), ("group_completed", UP), (status, UP), ("order", UP), ("traj_id", UP)],
            name=f"ready_{consumer}",
        ),
        # commit, recover
        IndexModel([(status, UP), (f"ledger.{consumer}.step", UP)], name=f"steps_{consumer}"),
        # step_lineage
        IndexModel([(f"ledger.{consumer}.trained_at", UP)], name=f"trained_at_{consumer}"),
        # consumed_groups
        IndexModel([("traj_id", UP), ("split", UP), (status, UP)], name=f"consumed_{consumer}"),
    ]

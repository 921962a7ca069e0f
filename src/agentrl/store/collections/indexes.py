"""Indexes, each declared with the query that it serves."""

from typing import Any

from pymongo import ASCENDING as UP
from pymongo import DESCENDING as DOWN
from pymongo import TEXT, IndexModel

from agentrl.schema import TERMINAL_STATUSES
from agentrl.store.documents.expressions import HAS_FAILURE

# Index words unchanged: code, numbers and all languages. Otherwise MongoDB would interpret a field
# `language`, which people may add to a document, as the name of a dictionary.
_TEXT_OPTIONS: dict[str, Any] = {
    "default_language": "none",
    "language_override": "agentrl_language",
}
BROWSED = ("outcome", "score.value", "attempt", "min_version", "max_version", "num_tokens")
"""Fields of `record_data` by which groups are filtered: written once, unless a score is repaired."""

INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # tasks.next_train_order, tasks.find, browse.groups
        IndexModel([("split", UP), ("order", UP), ("_id", UP)], name="in_order"),
        # tasks.add: orders stay unique when several processes add tasks concurrently
        IndexModel(
            [("order", UP)],
            name="one_order",
            unique=True,
            partialFilterExpression={"split": "train"},
        ),
        # tasks.first_open_order, tasks.count, run_counts
        IndexModel([("split", UP), ("status", UP), ("order", UP)], name="by_standing"),
        # tasks.count(tag=...): only tasks with a tag are indexed
        IndexModel(
            [("tag", UP), ("status", UP)],
            name="by_tag",
            partialFilterExpression={"tag": {"$gt": ""}},
        ),
        # browse.groups by a label of the dataset
        IndexModel(
            [("tags", UP), ("order", UP), ("_id", UP)],
            name="by_label",
            partialFilterExpression={"tags": {"$gt": ""}},
        ),
        # unused_blobs.unreferenced
        IndexModel(
            [("images", UP)], name="by_image", partialFilterExpression={"images": {"$gt": ""}}
        ),
        # browse.search
        IndexModel([("query", TEXT)], name="words", **_TEXT_OPTIONS),
    ],
    "records": [
        # records.claim: the filter and the sort in one; run_counts counts over it
        IndexModel([("status", UP), ("order", UP), ("traj_id", UP)], name="claimable"),
        # groups.reap, records.claim, scores.claim: slots without a lease are not indexed
        IndexModel(
            [("status", UP), ("lease.expires_at", UP)],
            name="leased",
            partialFilterExpression={"lease.expires_at": {"$exists": True}},
        ),
        # groups.complete, records.of_task
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
        # reports.find_records, and users' own queries for high or low scores
        IndexModel(
            [("score.value", UP), ("order", UP), ("traj_id", UP)],
            name="by_score",
            partialFilterExpression={"score.value": {"$exists": True}},
        ),
        # groups.reap, run_counts: ended records of groups that are not completed yet
        IndexModel(
            [("status", UP), ("task_id", UP)],
            name="unfinished_groups",
            partialFilterExpression={
                "group_open": True,
                "status": {"$in": sorted(TERMINAL_STATUSES)},
            },
        ),
        # reports.failures, the latest first
        IndexModel(
            [("started_at", DOWN), ("_id", UP)],
            name="failures",
            partialFilterExpression=HAS_FAILURE,
        ),
        # reports.missing_scores
        IndexModel([("outcome", UP)], name="dead", partialFilterExpression={"status": "failed"}),
        # browse.groups by the name of a tool
        IndexModel(
            [("tool_names", UP), ("order", UP), ("task_id", UP)],
            name="by_tool",
            partialFilterExpression={"tool_names": {"$gt": ""}},
        ),
        # browse.search
        IndexModel([("final_answer", TEXT), ("score.detail", TEXT)], name="words", **_TEXT_OPTIONS),
    ],
    "turns": [
        # turns.of_record, and users' own queries for the turns of a record
        IndexModel([("record_id", UP), ("attempt", UP), ("index", UP)], name="by_attempt"),
        # unused_blobs.unreferenced
        IndexModel([("blobs", UP)], name="by_blob", partialFilterExpression={"blobs": {"$gt": ""}}),
    ],
    "blobs": [
        # unused_blobs.remove
        IndexModel(
            [("unused_since", UP)],
            name="unused",
            partialFilterExpression={"unused_since": {"$exists": True}},
        ),
    ],
    "record_data": [
        # groups.complete, and whole groups for ledger.ready_groups
        IndexModel([("task_id", UP), ("traj_id", UP)], name="groups"),
        # browse.groups: filters of any combination are answered from the keys alone
        IndexModel(
            [("split", UP), ("order", UP), ("task_id", UP), *((name, UP) for name in BROWSED)],
            name="browsed",
        ),
    ],
    "turn_training": [
        # lineage.of_step, ledger.recover
        IndexModel([("consumer", UP), ("step", UP)], name="by_step"),
        # lineage.of_record, and users' own queries for a turn
        IndexModel([("record_id", UP), ("turn_id", UP), ("step", UP)], name="by_turn"),
        # lineage.worst_decisions
        IndexModel(
            [("consumer", UP), ("worth.change", UP), ("step", DOWN)],
            name="decisions",
            partialFilterExpression={"worth.is_decision": True},
        ),
    ],
    "forks": [
        # forks.of_task, which lists the forks next to the rollouts of a question
        IndexModel([("task_id", UP), ("created_at", UP)], name="by_task"),
    ],
}
TURN_WORDS = IndexModel(
    [("output_text", TEXT), ("tool_results.content", TEXT)], name="words", **_TEXT_OPTIONS
)
"""browse.search in turns. Created on demand, because it makes every later insertion of a turn
slower."""


def ledger_indexes(consumer: str) -> list[IndexModel]:
    """Return the indexes of `record_data` that serve one trainer."""
    status = f"ledger.{consumer}.status"
    return [
        # ledger.ready_groups: in order, without a sort
        IndexModel(
            [("split", UP), ("group_completed", UP), (status, UP), ("order", UP), ("traj_id", UP)],
            name=f"ready_{consumer}",
        ),
        # ledger.commit, ledger.recover, ledger.num_reserved_groups, groups of a lost step in order
        IndexModel(
            [(status, UP), (f"ledger.{consumer}.step", UP), ("order", UP), ("traj_id", UP)],
            name=f"steps_in_order_{consumer}",
        ),
        # lineage.of_step
        IndexModel([(f"ledger.{consumer}.trained_at", UP)], name=f"trained_at_{consumer}"),
    ]

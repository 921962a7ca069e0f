"""Views for people: the events of a run, readable in Compass or mongosh, without binary fields."""

from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import (
    FAILED_ATTEMPTS,
    HAS_FAILURE,
    lookup,
    shown,
)


def _num_ids(field: str) -> Document:
    """Return the number of token ids in a field, including ids stored in a blob."""
    return {
        "$cond": [
            {"$eq": [{"$type": f"${field}"}, "binData"]},
            {"$toInt": {"$divide": [{"$binarySize": f"${field}"}, 4]}},
            f"${field}.num_tokens",
        ]
    }


_SECONDS: Document = {"$divide": [{"$subtract": ["$finished_at", "$started_at"]}, 1000]}
_TURNS = lookup(
    "turns",
    "turns",
    "_id",
    "turns",
    {"$sort": {"index": 1}},
    {
        "$project": {
            "_id": 0,
            "index": 1,
            "messages": "$added_messages",
            "text": "$output_text",
            "tool_calls": {"name": 1, "arguments": 1, "format_error": 1},
            "tool_results": {"name": 1, "content": 1, "is_error": 1},
            "finish_reason": 1,
            "branch_reason": 1,
            "num_added_tokens": _num_ids("added_ids"),
            "num_output_tokens": _num_ids("output_ids"),
            "versions": "$version_spans.version",
            "server": 1,
            "seconds": _SECONDS,
        }
    },
)
# Not unwound, so that the reader's filter and limit apply before the look-ups.
_TASK = lookup(
    *("tasks", "task_id", "_id", "task"),
    {"$project": {"_id": 0, "query": 1, "answer": 1, "tag": 1}},
)
_LEDGER = lookup("record_data", "_id", "_id", "data", {"$project": {"_id": 0, "ledger": 1}})
_SUMMARY: Document = {
    **shown("task_id", "traj_id", "split"),
    "tag": {"$first": "$task.tag"},
    "question": {"$first": "$task.query"},
    "reference": {"$first": "$task.answer"},
    **shown("status", "outcome", "final_answer"),
    # In its stored form, so that a filter on `score.value` uses the index.
    "score": shown("value", "scorer", "version", "detail"),
    **shown("attempt", "min_version", "max_version"),
    **shown("num_prompt_tokens", "num_output_tokens", "num_tool_calls"),
    "seconds": _SECONDS,
    "error": 1,
}

VIEWS: dict[str, tuple[str, list[Document]]] = {
    # Every record with its question, texts, tool calls, score and weight versions.
    "v_trajectories": (
        "records",
        [
            {"$match": {"status": {"$nin": ["planned", "pending"]}}},
            _TASK,
            _TURNS,
            _LEDGER,
            {
                "$project": {
                    **_SUMMARY,
                    "num_turns": {"$size": "$turns"},
                    "turns": 1,
                    "training": {"$first": "$data.ledger"},
                }
            },
        ],
    ),
    # One row per group: its status and its mean score.
    "v_progress": (
        "tasks",
        [
            lookup("records", "_id", "task_id", "tries"),
            {
                "$project": {
                    **shown("split", "order", "tag", "status"),
                    "question": "$query",
                    "num_tries": {"$size": "$tries"},
                    "statuses": "$tries.status",
                    "num_attempts": {"$sum": "$tries.attempt"},
                    "num_output_tokens": {"$sum": "$tries.num_output_tokens"},
                    "scores": "$tries.score.value",
                    "mean_score": {"$avg": "$tries.score.value"},
                    "min_version": {"$min": "$tries.min_version"},
                    "max_version": {"$max": "$tries.max_version"},
                    "completed_at": 1,
                }
            },
        ],
    ),
    # Slots that samplers run or could claim now: an autoscaler counts them. Evaluation slots have
    # negative orders, so they count whatever is admitted.
    "v_work": (
        "records",
        [
            {"$match": {"status": {"$in": ["pending", "running"]}}},
            {
                "$lookup": {
                    "from": "runs",
                    "as": "run",
                    "pipeline": [{"$project": {"_id": 0, **shown("admitted_groups", "status")}}],
                }
            },
            {"$unwind": "$run"},
            {
                "$match": {
                    "$expr": {
                        "$or": [
                            {"$eq": ["$status", "running"]},
                            {"$lt": ["$order", "$run.admitted_groups"]},
                        ]
                    }
                }
            },
            {"$project": shown("task_id", "traj_id", "split", "status", "order")},
        ],
    ),
    # Infrastructure failures: failed records, failed attempts, postponed scores.
    "v_failures": (
        "records",
        [
            {"$match": HAS_FAILURE},
            _TASK,
            {
                "$project": {
                    **_SUMMARY,
                    "num_failed_attempts": {"$size": FAILED_ATTEMPTS},
                    "last_error": {
                        "$last": {"$map": {"input": FAILED_ATTEMPTS, "in": "$$this.error"}}
                    },
                    "attempts": 1,
                }
            },
        ],
    ),
}


async def ensure_views(database: RunDatabase) -> None:
    """Create the views that are missing, and replace those of an earlier release."""
    existing = await database.collections(type="view")
    for name, (source, pipeline) in VIEWS.items():
        if existing.get(name, {}).get("pipeline") == pipeline:
            continue
        if name in existing:
            await database.handle.drop_collection(name)
        await database.create_collection(name, viewOn=source, pipeline=pipeline)

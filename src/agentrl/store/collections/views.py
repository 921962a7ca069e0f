"""Views for people: what happened, readable in Compass or mongosh, without binary fields."""

from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import FAILED_ATTEMPTS, HAS_FAILURE


def _num_ids(field: str) -> Document:
    """Return the number of token ids in a field, also where they are kept in a blob."""
    return {
        "$cond": [
            {"$eq": [{"$type": f"${field}"}, "binData"]},
            {"$toInt": {"$divide": [{"$binarySize": f"${field}"}, 4]}},
            f"${field}.num_tokens",
        ]
    }


def _lookup(source: str, local: str, foreign: str, name: str, *pipeline: Document) -> Document:
    """Return the stage that adds the documents of `source` with `foreign` equal to `local`."""
    stage = {"from": source, "localField": local, "foreignField": foreign, "as": name}
    return {"$lookup": {**stage, "pipeline": list(pipeline)} if pipeline else stage}


def _unwind(name: str) -> Document:
    return {"$unwind": {"path": f"${name}", "preserveNullAndEmptyArrays": True}}


_SECONDS: Document = {"$divide": [{"$subtract": ["$finished_at", "$started_at"]}, 1000]}
_TURNS = _lookup(
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
_TASK = [
    _lookup(
        *("tasks", "task_id", "_id", "task"),
        {"$project": {"_id": 0, "query": 1, "answer": 1, "tag": 1}},
    ),
    _unwind("task"),
]
_LEDGER = [
    _lookup("record_data", "_id", "_id", "data", {"$project": {"_id": 0, "ledger": 1}}),
    _unwind("data"),
]
_SUMMARY: Document = {
    "task_id": 1,
    "traj_id": 1,
    "split": 1,
    "tag": "$task.tag",
    "question": "$task.query",
    "reference": "$task.answer",
    "status": 1,
    "outcome": 1,
    "final_answer": 1,
    "score": "$score.value",
    "scorer": "$score.scorer",
    "scorer_version": "$score.version",
    "score_detail": "$score.detail",
    "attempt": 1,
    "min_version": 1,
    "max_version": 1,
    "num_prompt_tokens": 1,
    "num_output_tokens": 1,
    "num_tool_calls": 1,
    "seconds": _SECONDS,
    "error": 1,
}

VIEWS: dict[str, tuple[str, list[Document]]] = {
    # Every try with its question, texts, tool calls, score and weight versions.
    "v_trajectories": (
        "records",
        [
            {"$match": {"status": {"$ne": "pending"}}},
            *_TASK,
            _TURNS,
            *_LEDGER,
            {
                "$project": {
                    **_SUMMARY,
                    "num_turns": {"$size": "$turns"},
                    "turns": 1,
                    "training": "$data.ledger",
                }
            },
        ],
    ),
    # One row a group: its standing and its mean score.
    "v_progress": (
        "tasks",
        [
            _lookup("records", "_id", "task_id", "tries"),
            {
                "$project": {
                    "split": 1,
                    "order": 1,
                    "tag": 1,
                    "status": 1,
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
                    "pipeline": [{"$project": {"_id": 0, "admitted_groups": 1, "status": 1}}],
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
            {"$project": {"task_id": 1, "traj_id": 1, "split": 1, "status": 1, "order": 1}},
        ],
    ),
    # What went wrong in the infrastructure: failed records, attempts that ended badly, late scores.
    "v_failures": (
        "records",
        [
            {"$match": HAS_FAILURE},
            *_TASK,
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

"""Views for people: what happened, readable in Compass or mongosh, without binary fields."""

from agentrl.store.codec import Document

_TURNS: Document = {
    "$lookup": {
        "from": "turns",
        "localField": "turns",
        "foreignField": "_id",
        "as": "turns",
        "pipeline": [
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
                    "num_output_tokens": {
                        "$sum": {
                            "$map": {
                                "input": "$version_spans",
                                "in": {"$subtract": ["$$this.end", "$$this.start"]},
                            }
                        }
                    },
                    "versions": "$version_spans.version",
                    "server": 1,
                }
            },
        ],
    }
}
_TASK: list[Document] = [
    {
        "$lookup": {
            "from": "tasks",
            "localField": "task_id",
            "foreignField": "_id",
            "as": "task",
            "pipeline": [{"$project": {"_id": 0, "query": 1, "answer": 1, "tag": 1}}],
        }
    },
    {"$unwind": {"path": "$task", "preserveNullAndEmptyArrays": True}},
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
    "attempt": 1,
    "min_version": 1,
    "max_version": 1,
    "num_prompt_tokens": 1,
    "num_output_tokens": 1,
    "num_tool_calls": 1,
    "seconds": {
        "$divide": [{"$subtract": ["$finished_at", "$started_at"]}, 1000],
    },
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
            {"$project": {**_SUMMARY, "turns": 1}},
        ],
    ),
    # One row a group: its standing and its mean score.
    "v_progress": (
        "tasks",
        [
            {
                "$lookup": {
                    "from": "records",
                    "localField": "_id",
                    "foreignField": "task_id",
                    "as": "tries",
                }
            },
            {
                "$project": {
                    "split": 1,
                    "order": 1,
                    "tag": 1,
                    "status": 1,
                    "question": "$query",
                    "num_tries": {"$size": "$tries"},
                    "statuses": "$tries.status",
                    "scores": "$tries.score.value",
                    "mean_score": {"$avg": "$tries.score.value"},
                    "min_version": {"$min": "$tries.min_version"},
                    "max_version": {"$max": "$tries.max_version"},
                    "completed_at": 1,
                }
            },
        ],
    ),
    # What went wrong in the infrastructure: parked records, attempts that ended badly, late scores.
    "v_failures": (
        "records",
        [
            {
                "$match": {
                    "$or": [
                        {"status": "failed"},
                        {"error": {"$ne": None}},
                        {"attempts.ended_by": {"$in": ["expired", "error"]}},
                    ]
                }
            },
            *_TASK,
            {"$project": {**_SUMMARY, "attempts": 1}},
        ],
    ),
}

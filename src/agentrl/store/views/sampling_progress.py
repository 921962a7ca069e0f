"""How sampling goes: the last scored answers, and the rollout that has been running for longest."""

import asyncio

from agentrl.schema import Run
from agentrl.schema.base import Value
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document, from_document
from agentrl.store.documents.expressions import shown
from agentrl.store.views.answer_figures import ANSWER_FIELDS, AnswerFigures, answer_figures

RECENT_ANSWERS = 256


class RunningRollout(Value):
    """A rollout that is running, with what it has written to the store so far."""

    record_id: str
    seconds: float
    num_turns: int
    """Complete turns."""
    num_output_tokens: int
    """Tokens of these turns."""


class SamplingProgress(Value):
    """Training rollouts of a run, as far as they show why a step takes long."""

    recent: AnswerFigures | None = None
    """Figures of the last `RECENT_ANSWERS` scored training rollouts, by the order of questions."""
    longest: RunningRollout | None = None
    num_dropped: int = 0
    """Groups that the trainer dropped from the step that is being sampled."""


async def read_sampling_progress(database: RunDatabase, consumer: str) -> SamplingProgress:
    """Return how the sampling of the step goes that the trainer `consumer` waits for."""
    recent, longest, num_dropped = await asyncio.gather(
        _recent(database), _longest(database), _num_dropped(database, consumer)
    )
    return SamplingProgress(recent=recent, longest=longest, num_dropped=num_dropped)


async def _recent(database: RunDatabase) -> AnswerFigures | None:
    scored: Document = {"status": "scored", "order": {"$gte": 0}}
    cursor = database.records.find(scored, ANSWER_FIELDS)
    newest_first = cursor.sort([("order", -1), ("traj_id", -1)]).limit(RECENT_ANSWERS)
    return answer_figures(await newest_first.to_list())


async def _longest(database: RunDatabase) -> RunningRollout | None:
    running: Document = {"status": "running", "order": {"$gte": 0}, "started_at": {"$ne": None}}
    found = await database.aggregate(
        database.records,
        [
            {"$match": running},
            {"$sort": {"started_at": 1}},
            {"$limit": 1},
            {
                "$project": {
                    "num_turns": {"$size": "$turns"},
                    "num_output_tokens": 1,
                    "milliseconds": {"$subtract": ["$$NOW", "$started_at"]},
                }
            },
        ],
    )
    if not found:
        return None
    return RunningRollout(
        record_id=found[0]["_id"],
        seconds=found[0]["milliseconds"] / 1000,
        num_turns=found[0]["num_turns"],
        num_output_tokens=found[0]["num_output_tokens"],
    )


async def _num_dropped(database: RunDatabase, consumer: str) -> int:
    run = await database.runs.find_one({}, shown("policy_version", "lost_versions"))
    return await database.record_data.count_documents(
        {
            f"ledger.{consumer}.status": "dropped",
            f"ledger.{consumer}.step": 1 + (from_document(Run, run).step if run else 0),
            "split": "train",
            "traj_id": 0,
        }
    )

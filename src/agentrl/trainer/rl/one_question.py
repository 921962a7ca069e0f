"""Conversations about one question, now: what `TrainingRun.sample` asks of the samplers.

They claim the task before all others, and nothing trains on it.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentrl.config.sections import DataSection
from agentrl.datasets.question import question_of
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.errors import StoreError
from agentrl.schema import TERMINAL_STATUSES, Record
from agentrl.store import TrajectoryStore

_TAG = "asked"
_POLL_SECONDS = 0.1
_FIRST_ORDER = -(10**6)
"""Before the questions of evaluations."""


async def ask(
    store: TrajectoryStore,
    row: Mapping[str, Any],
    data: DataSection,
    *,
    num_samples: int,
    timeout_seconds: float,
) -> list[Record]:
    """Return the finished records of a question."""
    entry = {**row, "id": f"{_TAG}-{uuid4().hex[:12]}"}
    question = question_of(entry, data, "the question", Path.cwd())
    (task,) = tasks_from_questions(
        [question], "eval", num_generations=num_samples, first_order=_FIRST_ORDER, tag=_TAG
    )
    await store.tasks.add([task])
    deadline = time.monotonic() + timeout_seconds
    while True:
        records = await store.records.of_task(task.id)
        if records and all(record.status in TERMINAL_STATUSES for record in records):
            return records
        if time.monotonic() > deadline:
            raise StoreError(
                f"{task.id}: the conversations did not finish within {timeout_seconds:g} s; are "
                "samplers and servers up?"
            )
        await asyncio.sleep(_POLL_SECONDS)

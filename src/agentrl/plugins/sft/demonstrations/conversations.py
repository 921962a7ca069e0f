"""Conversations of a run as files of JSON lines.

Input: a store. Output: a folder with one file per split. `agentrl sft` and tools for OpenAI's
fine-tuning format read its rows.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from agentrl.errors import ConfigError
from agentrl.renderers.stored_conversations import conversations_of
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import MCPTask, Record, Task
from agentrl.store import TrajectoryStore


async def export_chat(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write the conversations of all ended records; see `agentrl.cli.run_formats.RunExport`."""
    if await asyncio.to_thread(folder.exists):
        raise ConfigError(f"{folder} already exists; choose a new folder")
    counts: dict[str, int] = {}
    with atomic_directory(folder) as staging, ExitStack() as stack:
        files: dict[str, TextIO] = {}
        async for split, row in _rows(store):
            if split not in files:
                path = staging / f"{split}.jsonl"
                files[split] = stack.enter_context(path.open("w", encoding="utf-8"))
            files[split].write(json.dumps(row, ensure_ascii=False) + "\n")
            counts[split] = counts.get(split, 0) + 1
    return "conversations", counts


async def _rows(store: TrajectoryStore) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the split and the row of every conversation."""
    task: Task | None = None
    async for record in store.records.find():
        if record.outcome is None:
            continue
        if task is None or task.id != record.task_id:
            task = await store.tasks.get(record.task_id)
        turns = await store.turns.of_record(record.id)
        for number, (messages, tools) in enumerate(conversations_of(turns)):
            yield (
                record.split,
                {
                    "id": record.id if number == 0 else f"{record.id}#{number}",
                    "messages": messages,
                    **({"tools": tools} if tools else {}),
                    **_facts(record, task),
                },
            )


def _facts(record: Record, task: Task | None) -> dict[str, Any]:
    return {
        "record": record.id,
        "task": record.task_id,
        "outcome": record.outcome,
        "answer": record.final_answer,
        "reference": task.answer if isinstance(task, MCPTask) else None,
        "score": None if record.score is None else record.score.value,
        "scorer": None if record.score is None else record.score.scorer,
        "min_version": record.min_version,
        "max_version": record.max_version,
    }

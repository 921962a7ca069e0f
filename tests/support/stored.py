"""Hand-made documents, and a store played by hand: what a sampler would have written."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Message,
    Record,
    SamplingParams,
    Score,
    Split,
    ToolCall,
    VersionSpan,
)
from agentrl.store import TrajectoryStore

SYSTEM = "You answer with the help of tools. " * 20
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a price up. " * 20,
            "parameters": {"type": "object", "$defs": {}, "properties": {"q": {"type": "string"}}},
        },
    },
)


def make_task(
    number: int, *, num_generations: int = 2, split: Split = "train", tag: str = ""
) -> MCPTask:
    """A task; evaluation tasks get negative orders."""
    return MCPTask(
        id=f"{split}/0/q{number}",
        split=split,
        order=number if split == "train" else number - 1000,
        num_generations=num_generations,
        query=f"What does item {number} cost?",
        system_prompt=SYSTEM,
        answer=number,
        columns={"shelf": number},
        tag=tag,
    )


def make_turn(
    record: Record,
    index: int,
    *,
    version: int = 0,
    num_added: int = 100,
    num_output: int = 7,
    text: str = "<answer>4</answer>",
    tool_calls: Sequence[ToolCall] = (),
    messages: Sequence[Message] | None = None,
) -> DispatchedSamplingTask:
    """A turn that extends the one before it in full."""
    rng = np.random.default_rng(index)
    root: tuple[Message, ...] = (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{record.task_id}?"},
    )
    return DispatchedSamplingTask(
        id=f"{record.id}/{record.fence}/{index}",
        record_id=record.id,
        task_id=record.task_id,
        attempt=record.attempt,
        index=index,
        parent=index - 1 if index else None,
        shared_len=index * (num_added + num_output),
        added_ids=rng.integers(0, 2**31 - 1, num_added),
        output_ids=rng.integers(0, 2**31 - 1, num_output),
        output_logprobs=-rng.random(num_output, dtype=np.float32),
        version_spans=(VersionSpan(version=version, start=0, end=num_output),),
        added_messages=tuple(messages) if messages is not None else (() if index else root),
        tools=() if index else TOOLS,
        output_text=text,
        tool_calls=tuple(tool_calls),
        finish_reason="stop",
        sampling_params=SamplingParams(max_new_tokens=64),
        server="http://127.0.0.1:1",
    )


async def claim(
    store: TrajectoryStore,
    owner: str = "sampler",
    *,
    lease_seconds: float = 60,
    max_attempts: int = 3,
    resumable: bool = False,
) -> Record:
    """Claim the next slot, which must be there."""
    claimed = await store.records.claim(
        owner,
        lease_seconds=lease_seconds,
        admitted_groups=1_000_000,
        max_attempts=max_attempts,
        resumable=resumable,
    )
    assert claimed is not None
    return claimed[0]


async def play(
    store: TrajectoryStore,
    record: Record,
    *,
    score: float | None = 1.0,
    num_turns: int = 1,
    version: int = 0,
) -> Record:
    """Play a claimed slot to its end; without a score it stays finished."""
    for index in range(num_turns):
        await store.turns.append(make_turn(record, index, version=version), record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    if score is not None:
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=score))
    return await read_back(store, record)


async def read_back(store: TrajectoryStore, record: Record) -> Record:
    """Return a Record as the store has it now."""
    stored = await store.records.get(record.id)
    assert stored is not None
    return stored


async def group_scores(store: TrajectoryStore, task_id: str) -> list[float | None]:
    """The scores of a Task's Records by `traj_id`; None where there is none (yet)."""
    records = await store.records.of_task(task_id)
    return [record.score.value if record.score else None for record in records]


async def tag_scores(store: TrajectoryStore, tag: str) -> dict[str, list[float | None]]:
    """The scores of all tasks under a tag."""
    ids = [task.id async for task in store.tasks.find(tag=tag)]
    return {task_id: await group_scores(store, task_id) for task_id in ids}


async def fill(
    store: TrajectoryStore, num_groups: int, *, num_generations: int = 2, num_turns: int = 1
) -> list[str]:
    """Push and play whole groups; returns the record ids by (order, traj_id)."""
    await store.tasks.add(
        make_task(number, num_generations=num_generations) for number in range(num_groups)
    )
    ids = []
    for _ in range(num_groups * num_generations):
        record = await play(store, await claim(store), num_turns=num_turns)
        ids.append(record.id)
    return ids


async def wrong_counts(store: TrajectoryStore, consumer: str = "trainer") -> list[str]:
    """Compare what the store says of the run with a count of every document; nothing may move."""
    records = [record async for record in store.records.find()]
    tasks = [task async for task in store.tasks.find()]
    said: dict[str, object] = {}
    counted: dict[str, object] = {}
    for split, found in (await store.reports.by_split()).items():
        said[split] = found.model_dump()
    for split in {task.split for task in tasks}:
        mine = [record for record in records if record.split == split]
        scores = [
            record.score.value for record in mine if record.status == "scored" and record.score
        ]
        counted[split] = {
            "num_groups": sum(task.split == split for task in tasks),
            "num_completed": sum((t.split, t.status) == (split, "completed") for t in tasks),
            "num_scored": len(scores),
            "num_failed": sum(record.status == "failed" for record in mine),
            "mean_score": sum(scores) / len(scores) if scores else None,
        }
    if await store.runs.get() is not None:
        progress = await store.reports.progress(consumer)
        for name, of_sign in (
            ("records", [record for record in records if record.order >= 0]),
            ("eval_records", [record for record in records if record.order < 0]),
        ):
            said[name] = getattr(progress, name)
            counted[name] = dict(Counter(record.status for record in of_sign))
        said["consumed"] = progress.num_groups_consumed
        counted["consumed"] = await num_consumed(store, consumer)
    return [
        f"{name}: said {said.get(name)}, counted {counted.get(name)}"
        for name in sorted(said.keys() | counted.keys())
        if said.get(name) != counted.get(name)
    ]


async def num_consumed(store: TrajectoryStore, consumer: str = "trainer") -> int:
    """Count the training groups of which a trainer has trained or dropped the first record."""
    consumed = {"$in": ["dropped", "trained"]}
    return await store.database["record_data"].count_documents(
        {"traj_id": 0, f"ledger.{consumer}.status": consumed, "split": "train"}
    )

"""A process of its own for races (run as a script). It reads commands, a line each:

claim URI     claim slots until there are none; answers with their ids
score URI     claim and finish one slot of every group, say so, and score it at the next line;
              answers with the groups it completed when there are no slots left
append URI    append turns until it is killed, answering with each acknowledged id
"""

import asyncio
import json
import os
import sys

from agentrl.schema import DispatchedSamplingTask, Record, SamplingParams, Score
from agentrl.store import TrajectoryStore


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def claim_all(store: TrajectoryStore, owner: str) -> list[str]:
    ids: list[str] = []
    while claimed := await store.records.claim(
        owner, lease_seconds=60, admitted_groups=10_000, max_attempts=3
    ):
        ids.append(claimed[0].id)
    return ids


async def score_own(store: TrajectoryStore, owner: str) -> list[str]:
    """Score one slot of every group in the same moment as seven others do."""
    completed: list[str] = []
    complete = store.groups.complete

    async def noting(task_ids: set[str]) -> set[str]:
        won = await complete(task_ids)
        completed.extend(won)
        return won

    store.groups.complete = noting  # type: ignore[method-assign, assignment]
    while claimed := await store.records.claim(
        owner, lease_seconds=60, admitted_groups=10_000, max_attempts=3
    ):
        record = claimed[0]
        key = (record.id, record.fence)
        await store.records.finish(*key, outcome="answered", final_answer="4", lease_seconds=60)
        say(record.task_id)
        sys.stdin.readline()
        await store.scores.set(*key, Score(scorer="exact", value=float(record.traj_id)))
    return completed


async def append_for_ever(store: TrajectoryStore, owner: str) -> None:
    claimed = await store.records.claim(
        owner, lease_seconds=600, admitted_groups=10, max_attempts=3
    )
    assert claimed is not None
    record, index = claimed[0], 0
    while True:
        await store.turns.append(small_turn(record, index), record.fence)
        say(f"{record.id}/{record.fence}/{index}")
        index += 1


def small_turn(record: Record, index: int) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"{record.id}/{record.fence}/{index}",
        record_id=record.id,
        task_id=record.task_id,
        attempt=record.attempt,
        index=index,
        parent=index - 1 if index else None,
        added_ids=[1, 2],
        output_ids=[3],
        output_logprobs=[-0.5],
        version_spans=(),
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )


async def obey(command: str, uri: str) -> None:
    owner = f"worker:{os.getpid()}"
    async with TrajectoryStore.connect(uri) as store:
        if command == "claim":
            say(await claim_all(store, owner))
        elif command == "score":
            say(await score_own(store, owner))
        else:
            await append_for_ever(store, owner)


def main() -> None:
    say("ready")
    for line in sys.stdin:
        asyncio.run(obey(*line.split()))


main()

"""A run with one of everything that the inspector shows, hostile texts among it."""

import base64
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
from support.stored import claim, make_task, make_turn

from agentrl.plugins.inspector.policy_diff import FlipGroup, PartChange, PolicyDiff
from agentrl.schema import (
    Fork,
    Policy,
    RatioStats,
    Run,
    Score,
    Seat,
    TokenTrainings,
    ToolCall,
    ToolResult,
    TurnTraining,
)
from agentrl.schema.image import image_from_bytes
from agentrl.store import TrajectoryStore

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[31mred\x1b[0m \u202egnp.exe\u202c \u200bhidden \ud800 \x00 </pre></td>"
)
HUGE = "0123456789" * 500_000
NUM_GROUPS = 3
HOSTILE_RECORD = "train/0/q1/0"
FORKED_RECORD = "train/0/q0/0"


def step_figures(step: int) -> dict[str, Any]:
    """Return figures as a trainer stores them."""
    return {
        "step": step,
        "reward_mean": 0.1 * step,
        "loss": 0.5,
        "grad_norm": 1.0 / step,
        "learning_rate": 1e-4,
        "entropy": 0.4,
        "ratio_mean": 1.0,
        "num_groups": 2,
        "num_records": 4,
        "num_trained_records": 4,
        "tokens_per_second": 900.0 + step,
        "staleness": {"0": 3, "1": 1},
        "masked_tokens": {"stale": 2},
        "dropped": {"zero_variance": 1},
        "seconds": {"wait_samples": 1.5, "forward_backward": 0.5, "publish": 0.2},
    }


async def seed(store: TrajectoryStore, name: str, *, num_steps: int = 3) -> None:
    """Fill an empty store: three groups of two tries, two of them trained by step 1."""
    await store.ensure_schema()
    config = {"max_steps": 5, "model_name_or_path": "assets/demo/model", "num_train_epochs": 2}
    await store.runs.create(Run(name=name, config=config, status="training", admitted_groups=9))
    tasks = [make_task(number, tag="") for number in range(NUM_GROUPS)]
    tasks[1] = tasks[1].model_copy(update={"query": f"How many? {HOSTILE}", "tags": ("counting",)})
    await store.tasks.add(tasks)
    for number in range(NUM_GROUPS * 2 - 1):
        await _play(store, number)
    failed = await claim(store)
    await store.records.fail_attempt(failed.id, failed.fence, "server 127.0.0.1:30001 is gone", 1)
    await _train(store, num_steps)


async def _play(store: TrajectoryStore, number: int) -> None:
    record = await claim(store)
    is_hostile = record.id == HOSTILE_RECORD
    (picture,) = await store.images.put([image_from_bytes(PIXEL)])
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": picture}},
                {"type": "text", "text": HOSTILE if is_hostile else "What does it cost?"},
            ],
        },
    ]
    call = ToolCall(id="c1", name="lookup", arguments={"q": HOSTILE if is_hostile else "figs"})
    text = f"<think>Let me look. {HOSTILE}</think>I look it up."
    first = make_turn(record, 0, num_output=40, text=text, messages=messages, tool_calls=[call])
    ids = dict.fromkeys(("added_ids", "output_ids"))
    shared = {name: getattr(first, name) % 500 for name in ids}
    first = first.model_copy(update=shared)
    await store.turns.append(first, record.fence)
    content = HOSTILE + HUGE if is_hostile else '{"price": 17, "unit": "zloty"}'
    result = ToolResult(call_id="c1", name="lookup", content=content, seconds=0.25)
    await store.turns.set_tool_results(first.id, record.id, record.fence, [result])
    last = make_turn(
        record, 1, num_added=12, num_output=6 + number, text=f"<answer>{number}</answer>"
    )
    size = len(first.added_ids) + len(first.output_ids)
    last = last.model_copy(
        update={
            "shared_len": size,
            "added_ids": last.added_ids % 500,
            "output_ids": (last.output_ids + number) % 500,
            "reward": 0.25,
            "seat": Seat(name="<b>\x1bleft</b>", stint=1, reward=0.75),
            "started_at": first.finished_at + timedelta(seconds=0.3),
            "finished_at": first.finished_at + timedelta(seconds=0.5),
        }
    )
    await store.turns.append(last, record.fence)
    await store.records.finish(
        record.id,
        record.fence,
        outcome="answered",
        final_answer=f"answer {number}",
        reward=0.5,
        metrics={"moves": 2.0, "<b>\x1bbold</b>": 0.5},
        lease_seconds=60,
    )
    detail = f"The judge says: {HOSTILE}" if is_hostile else "The judge says: marvellous"
    score = Score(scorer="judge", value=float(number % 2), detail=detail, inputs={"model": "m"})
    await store.scores.set(record.id, record.fence, score)


_SEEN = TokenTrainings(
    log_ratios=np.log(np.linspace(0.5, 1.5, 40)).astype("<f2").tobytes(),
    entropies=np.linspace(0.0, 2.0, 40).astype("<f2").tobytes(),
    uses=bytes([2, 2, 1, *[0] * 37]),
)


async def _train(store: TrajectoryStore, num_steps: int) -> None:
    groups = await store.ledger.ready_groups(limit=2)
    records = [data for group in groups for data in group]
    trained, dropped = records[:3], records[3:]
    await store.ledger.reserve("trainer", [one.record_id for one in trained], 1)
    await store.ledger.drop("trainer", [one.record_id for one in dropped], 1, "zero_variance")
    await store.ledger.commit("trainer", 1)
    await store.ledger.put_turn_trainings(
        [
            TurnTraining(
                id=f"trainer/1/{turn_id}",
                consumer="trainer",
                step=1,
                turn_id=turn_id,
                record_id=one.record_id,
                task_id=one.task_id,
                num_tokens=40,
                num_trained_tokens=38,
                masked={"ratio_out_of_range": 2},
                advantage=0.7,
                staleness=0,
                ratio=RatioStats(mean=1.02, std=0.1, min=0.5, max=1.4),
                tokens=_SEEN,
            )
            for one in trained
            for turn_id in one.turn_ids
        ]
    )
    for step in range(1, num_steps + 1):
        await store.figures.put_step("trainer", step_figures(step))
    await store.figures.put_evaluation("trainer", {"version": 0, "reward_mean": 0.25})
    await store.policies.publish(Policy(version=1, path="/weights/1", num_bytes=1000))


async def seed_diff(store: TrajectoryStore) -> None:
    """Compare version 0 with version 1: one decision of ten flips, from `look.up` to an answer."""
    part = PartChange(
        name="all",
        num_decisions=10,
        flips=0.1,
        kl=0.0123,
        greedy=0.25,
        reply_from=0.5,
        reply_to=0.75,
        calls_from={"look.up": 0.75, "answer": 0.25},
        calls_to={"look.up": 0.5, "answer": 0.5},
    )
    flip = FlipGroup(
        "look.up", "answer", "counting", "right", 1, FORKED_RECORD, 1, 0.25, 0.75, HOSTILE
    )
    found = PolicyDiff(
        *("inspected", "0", "1", "score < 0.5", 3, 8, 1000, 9000, 1.0, 0.5, 1.0, part, (flip,)),
        choices=(replace(part, name="look.up"),),
        tags=(replace(part, name=HOSTILE),),
        outcomes=(replace(part, name="right"),),
    )
    await store.figures.put_diff(asdict(found))


async def seed_fork(store: TrajectoryStore) -> None:
    """Play on from the last turn of a record, with another reply."""
    fork = Fork(
        id=f"fork:{FORKED_RECORD}@1-0a1b",
        record_id=FORKED_RECORD,
        attempt=1,
        task_id="train/0/q0",
        turn=1,
        version=1,
        messages=({"role": "tool", "tool_call_id": "c1", "content": HOSTILE},),
        sampling={"temperature": 0.5},
    )
    await store.forked.ensure_schema()
    await store.forks.add(fork)
    task = make_task(0, num_generations=1).model_copy(update={"id": fork.id})
    await store.forked.tasks.add([task])
    claimed = await store.forked.records.claim(
        "player", lease_seconds=60, admitted_groups=9, max_attempts=1, task_id=fork.id
    )
    assert claimed is not None
    record = claimed[0]
    for turn in await store.turns.of_record(FORKED_RECORD):
        turn_id = f"{record.id}/{record.fence}/{turn.index}"
        own: dict[str, Any] = {"id": turn_id, "record_id": record.id, "task_id": fork.id}
        if turn.index == 1:
            own |= {"output_ids": turn.output_ids[::-1] + 1, "output_text": f"Forked. {HOSTILE}"}
        await store.forked.turns.append(turn.model_copy(update=own), record.fence)
    await store.forked.records.finish(
        *(record.id, record.fence),
        outcome="answered",
        final_answer=f"a forked answer {HOSTILE}",
        lease_seconds=60,
    )
    score = Score(scorer="judge", value=1.0)
    await store.forked.scores.set(record.id, record.fence, score)

"""The turns of groups that branch: which record leaves which one where, and what turns are worth.

Input: a store. Output: for a group, one row for each record, branches below the record whose turn
they continue; for a run, the turns after which the worth fell most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.data.record_tree import record_tree, turn_worths
from agentrl.plugins.inspector.run_answers import consumer_of, run_of
from agentrl.schema import DBRecordData, DispatchedSamplingTask
from agentrl.store import TrajectoryStore

DECISIONS_SHOWN = 50
_EXCERPT_CHARS = 160
_QUESTION_CHARS = 300


async def worst_decisions(
    store: TrajectoryStore, *, limit: int = DECISIONS_SHOWN
) -> dict[str, Any]:
    """Return the trained turns of a run after which the worth fell most."""
    run = await run_of(store)
    trainings = await store.lineage.worst_decisions(consumer_of(run), limit=limit)
    turns = await store.turns.get_many([training.turn_id for training in trainings])
    texts = await store.behavior.question_texts([training.task_id for training in trainings])
    return {
        "has_branches": run.config.get("rollouts") == "tree",
        "rows": [
            {
                "record_id": training.record_id,
                "task_id": training.task_id,
                "index": turn.index,
                "question": texts.get(training.task_id, "")[:_QUESTION_CHARS],
                "text": excerpt(turn),
                "step": training.step,
                "credit": training.advantage,
                "worth": None if training.worth is None else training.worth.model_dump(mode="json"),
            }
            for training, turn in zip(trainings, turns, strict=True)
        ],
    }


async def turn_tree_of(
    store: TrajectoryStore, task_id: str, turns: Sequence[DispatchedSamplingTask]
) -> list[dict[str, Any]] | None:
    """Return the rows of a stored group, given the turns of its records; None without branches."""
    records = await store.lineage.records_of_group(task_id)
    if all(record.branch is None for record in records):
        return None
    by_record: defaultdict[str, list[DispatchedSamplingTask]] = defaultdict(list)
    for turn in turns:
        by_record[turn.record_id].append(turn)
    records = [
        record.model_copy(update={"turns": tuple(by_record[record.record_id])})
        for record in records
    ]
    consumer = consumer_of(await run_of(store))
    credit = await store.lineage.credits([record.record_id for record in records], consumer)
    return turn_tree(records, credit)


def turn_tree(
    records: Sequence[DBRecordData], credit: Mapping[str, float]
) -> list[dict[str, Any]] | None:
    """Return the rows of a group's turns; None if no record leaves another one."""
    tree = record_tree(records)
    if not any(tree.num_inherited):
        return None
    scores = [None if record.score is None else record.score.value for record in records]
    worths = turn_worths(tree, scores)
    owners = {
        number: position
        for position, (path, shared) in enumerate(zip(tree.turns, tree.num_inherited, strict=True))
        for number in path[shared:]
    }
    # A rule may leave a branch at a turn that it has copied: the record that sampled it is the parent.
    parents = [
        owners[path[shared - 1]] if shared else None
        for path, shared in zip(tree.turns, tree.num_inherited, strict=True)
    ]
    rows = []
    for position in _in_order(parents, tree.num_inherited):
        record, shared = records[position], tree.num_inherited[position]
        parent = parents[position]
        rows.append(
            {
                "record_id": record.record_id,
                "traj_id": record.traj_id,
                "score": scores[position],
                "parent": None if parent is None else records[parent].traj_id,
                "shared": shared,
                "rule": record.branch.rule if record.branch else None,
                "reason": record.branch.reason if record.branch else "",
                "turns": [
                    {
                        "index": turn.index,
                        "text": excerpt(turn),
                        "credit": credit.get(turn.id),
                        "worth": None if worth is None else worth.model_dump(mode="json"),
                    }
                    for turn, number in zip(record.turns, tree.turns[position], strict=True)
                    if turn.index >= shared
                    for worth in (worths.get(number),)
                ],
            }
        )
    return rows


def excerpt(turn: DispatchedSamplingTask) -> str:
    """Return what a turn did in a few words: its calls, or its text where one is malformed."""
    if any(call.format_error is not None for call in turn.tool_calls):
        return turn.output_text[:_EXCERPT_CHARS]
    calls = ", ".join(f"{call.name}({_arguments(call.arguments)})" for call in turn.tool_calls)
    return (calls or turn.output_text)[:_EXCERPT_CHARS]


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in arguments.values())


def _in_order(parents: Sequence[int | None], shared: Sequence[int]) -> list[int]:
    """Return the positions of the records, each before its branches, those that left last first."""
    order: list[int] = []
    waiting = sorted((at for at, parent in enumerate(parents) if parent is None), reverse=True)
    while waiting:
        at = waiting.pop()
        order.append(at)
        branches = [child for child, parent in enumerate(parents) if parent == at]
        waiting += sorted(branches, key=lambda child: (shared[child], -child))
    return order

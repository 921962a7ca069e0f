"""The start of a rollout that does not begin at the question, and the turns before it.

Input: a claimed slot. Output: what its sampler replays. In a later round, that is the start of another
rollout of the group, up to a branch point that the slot's first holder chooses and that outlives it. A
task with a `StoredStart` brings the turns along.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.rollout.branch_rules import BranchingGroup, choose_branch
from agentrl.rollout.context import RolloutContext, Scoring
from agentrl.rollout.recorded_turns import RecordedTurns
from agentrl.schema import DispatchedSamplingTask, Record
from agentrl.schema.stored_start import StoredStart
from agentrl.tools import ToolsConfig


async def with_branch(context: RolloutContext, record: Record) -> Record:
    """Return a claimed Record of a later round with its branch point, which is chosen only once."""
    if record.branch is not None or record.no_branch:
        return record
    group = await _group(context, record)
    point, why_none = choose_branch(context.rollout.branch_rule, group)
    return await context.store.records.choose_branch(record.id, record.fence, point, why_none)


async def branch_turns(
    context: RolloutContext, sampler: AsyncSampler[Any], own: Sequence[DispatchedSamplingTask]
) -> RecordedTurns:
    """Return what the sampler of a Record with a branch point replays.

    Args:
        context: clients and settings of the process.
        sampler: the rollout.
        own: the turns of the attempt, if another process began it.
    """
    point = sampler.record.branch
    assert point is not None
    check_can_branch(type(sampler), is_resumable=context.resumable)
    parent = await context.store.turns.of_record(point.record_id, point.attempt)
    state = None
    if point.turn < len(parent):
        state = await context.store.snapshots.get(parent[point.turn].snapshot)
    replays_calls = state is None and not context.resumable
    return RecordedTurns.before_branch(
        parent, point.turn, own, replays_calls=replays_calls, state=state
    )


def stored_turns(
    context: RolloutContext,
    sampler: AsyncSampler[Any],
    start: StoredStart,
    own: Sequence[DispatchedSamplingTask],
) -> RecordedTurns:
    """Return what the sampler of a task with a stored start replays; see `branch_turns`."""
    check_can_branch(type(sampler), is_resumable=context.resumable)
    return RecordedTurns.before_branch(
        start.turns, start.turn, own, replays_calls=not context.resumable
    )


def check_can_branch(sampler_class: type[AsyncSampler[Any]], *, is_resumable: bool) -> None:
    """Refuse a sampler class whose rollouts cannot start at a turn of another."""
    if not (is_resumable or sampler_class.can_branch):
        raise ConfigError(
            f"{sampler_class.__name__} cannot start at a turn of another rollout (--rollouts tree, "
            "--env stored); give --resumable_tools true if it keeps no state beside its turns, or set its "
            "`can_branch` (see docs/rollouts.md)"
        )


def check_tools_can_branch(config: RootConfig, tools: ToolsConfig, flag: str = "") -> None:
    """Refuse tool servers whose state cannot be restored where `flag`, or a tree, starts rollouts."""
    if not (flag or config.data.rounds) or config.tools.resumable_tools:
        return
    for name, server in tools.selected.items():
        if not (server.resumable or server.per_rollout):
            raise ConfigError(
                f"{flag or '--rollouts tree'}: tool server {name!r} declares neither `resumable` (it keeps no "
                "state) nor `per_rollout` (its state is rebuilt by repeating a rollout's calls): no "
                "rollout could start where another one was; declare one of them, or give "
                "--resumable_tools true if no server keeps state"
            )


def check_scorer_of_trees(scoring: Scoring, scorer: str) -> None:
    """Refuse a scorer that waits for the whole group, whose later rounds wait for its scores."""
    if scoring.sees_group(scorer):
        raise ConfigError(
            f"--rollouts tree: scorer {scorer!r} scores all rollouts of a question together, but "
            "later ones start when earlier ones have their scores; choose another scorer, or give "
            "--rollouts chains"
        )


async def _group(context: RolloutContext, record: Record) -> BranchingGroup:
    records = await context.store.records.of_task(record.task_id)
    earlier = tuple(one for one in records if one.round < record.round)
    turns = await context.store.turns.get_many([turn for one in earlier for turn in one.turns])
    first = min(one.traj_id for one in records if one.round == record.round)
    round_seed = f"{context.seed}/{record.task_id}/{record.round}"
    return BranchingGroup(
        records=earlier,
        turns={one.id: [turn for turn in turns if turn.record_id == one.id] for one in earlier},
        round=record.round,
        position=record.traj_id - first,
        depth=context.rollout.branch_depth or context.rollout.max_turns,
        seed=f"{round_seed}/{record.traj_id}",
        round_seed=round_seed,
    )

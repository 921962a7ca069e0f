"""Turns of one rollout get their places, and a write that fails is never forgotten."""

import asyncio
from typing import Any

import pytest
from support.stored import claim, make_task, make_turn

from agentrl.errors import StoreError
from agentrl.rollout.turn_writes import TurnWrites
from agentrl.schema import ToolResult
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.turns import CARRY_SECONDS


async def test_turns_that_come_together_get_places_one_after_the_other(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    writes = TurnWrites(store, record)
    turn = make_turn(record, 0)
    waiting = [asyncio.create_task(writes.append(turn)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await writes.finish()
    assert [turn.index for turn in writes.turns] == [0, 1, 2]
    stored = await store.turns.of_record(record.id)
    assert [turn.id for turn in stored] == [turn.id for turn in writes.turns]


async def test_the_turn_behind_a_write_that_fails_is_known_and_the_failure_stays(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    writes = TurnWrites(store, record)
    await writes.append(make_turn(record, 0))
    no_number: Any = object()
    writes.reward({0: no_number})
    writes.attach_results([ToolResult(call_id="c", name="f", content="4")], 0)
    with pytest.raises(StoreError, match="store rewards of turns"):
        await writes.append(make_turn(record, 1))
    assert [turn.index for turn in writes.turns] == [0, 1]
    with pytest.raises(StoreError, match="store rewards of turns"):
        await writes.finish()
    await writes.discard()
    assert len(await store.turns.of_record(record.id)) == 2


async def test_results_of_a_discarded_rollout_are_not_written_later(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    writes = TurnWrites(store, record)
    await writes.append(make_turn(record, 0))
    writes.attach_results([ToolResult(call_id="c", name="f", content="4")], 0)
    await asyncio.sleep(0)
    await writes.discard()
    await asyncio.sleep(4 * CARRY_SECONDS)
    (turn,) = await store.turns.of_record(record.id)
    assert turn.tool_results == ()

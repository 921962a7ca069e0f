"""Forks by a scripted model with real tools: what is kept, what is sampled anew, what is refused."""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.scripted_engine import ScriptedEngine, serve_script
from support.play import begin_run, open_play, play, tool_call

from agentrl.errors import ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.worker.fork_player import play as play_fork
from agentrl.rollout.worker.fork_player import store_fork
from agentrl.schema import DispatchedSamplingTask, Fork, MCPTask, Message, Record, rebuild_prompts
from agentrl.schema.fork import check_fork_turn, shown_before
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.forks import new_fork_id

TASK = MCPTask(id="train/0/q1", query="What does the lamp cost?", answer="7")
PARENT = "train/0/q1/0"


def script(prompt: str) -> str:
    """Look the lamp up, then answer with what the tool said."""
    _, answered, result = prompt.rpartition("<tool_response>")
    if not answered:
        return tool_call("look", key="rug" if "rug" in prompt else "lamp")
    return f"<answer>{result.partition('</tool_response>')[0].strip()}</answer>"


async def forked(
    store: TrajectoryStore,
    engine: ScriptedEngine,
    tools_url: str,
    parent: Sequence[DispatchedSamplingTask],
    turn: int,
    *,
    messages: Iterable[Message] | None = None,
    num_tries: int = 1,
    **how: Any,
) -> tuple[Record, list[DispatchedSamplingTask]]:
    """Play a fork of the parent; return its last try and that one's turns."""
    fork = Fork(
        id=new_fork_id(PARENT, turn),
        record_id=PARENT,
        attempt=1,
        task_id=TASK.id,
        turn=turn,
        version=0,
        messages=None if messages is None else tuple(messages),
        sampling={"temperature": 0.5},
    )
    task = await store_fork(store, fork, TASK, num_tries)
    settings = {"tools_keep_state": False, "by_agent": False, "max_running": 2, **how}
    async with open_play(store, engine, tools_url) as context:
        ended = [one async for one in play_fork(context, fork, task, parent, **settings)]
    assert sorted(one.id for one in ended) == [f"{fork.id}/{n}" for n in range(num_tries)]
    return ended[-1], await store.forked.turns.get_many(ended[-1].turns)


async def played(
    store: TrajectoryStore, engine: ScriptedEngine, tools_url: str
) -> list[DispatchedSamplingTask]:
    await store.ensure_schema()
    await begin_run(store, engine, TASK)
    async with open_play(store, engine, tools_url) as context:
        _, turns = await play(store, context)
    return turns


async def test_a_fork_keeps_the_stored_tokens_and_nothing_of_it_reaches_the_run(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        # Ids that no text of theirs would be encoded to.
        odd = parent[0].model_copy(update={"output_ids": parent[0].output_ids[::-1]})
        before = {name: await store.database[name].count_documents({}) for name in RUN_OWN}
        first, _ = await forked(store, engine, tools_url, [odd, parent[1]], 1, num_tries=2)
        sent = np.array(engine.requests[-1]["input_ids"], dtype=np.int32)
        again, turns = await forked(store, engine, tools_url, parent, 0)
    assert np.array_equal(sent, rebuild_prompts([odd, parent[1]])[1])
    assert (first.status, first.outcome, first.final_answer) == ("scored", "answered", "7")
    assert first.score is not None
    assert first.score.value == 1
    assert np.array_equal(rebuild_prompts(turns)[0], rebuild_prompts(parent)[0])
    assert [one.sampling_params.temperature for one in turns] == [0.5, 0.5]
    assert {one.record_id for one in turns} == {again.id}
    after = {name: await store.database[name].count_documents({}) for name in RUN_OWN}
    assert after == before
    assert await store.ledger.ready_groups(limit=9) == []
    counts = (await store.reports.by_split())["train"]
    assert (counts.num_groups, counts.num_scored) == (1, 0)  # the parent was played, not scored
    assert [one.turn for one in await store.forks.of_task(TASK.id)] == [1, 0]


RUN_OWN = ("tasks", "records", "turns", "record_data", "runs")


async def test_an_edited_result_changes_the_answer(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        (shown,) = shown_before(parent, 1)
        assert shown == {
            "role": "tool",
            "tool_call_id": "call_0_0",
            "name": "look",
            "content": "7",
        }
        record, turns = await forked(
            store, engine, tools_url, parent, 1, messages=[{**shown, "content": "9"}]
        )
        asked, _ = await forked(
            store,
            engine,
            tools_url,
            parent,
            0,
            messages=[{"role": "user", "content": "What does the rug cost?"}],
        )
    assert (record.final_answer, record.score and record.score.value) == ("9", 0)
    assert [one.content for one in turns[0].tool_results] == ["9"]
    assert turns[1].added_messages == ()
    assert [one.content for one in parent[0].tool_results] == ["7"]
    assert asked.final_answer == "12"


async def test_tools_that_keep_state_are_not_called_and_recorded_results_go_as_far_as_they_can(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, tool_log: Path
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        calls = tool_log.read_text()
        same, _ = await forked(store, engine, tools_url, parent, 0, tools_keep_state=True)
        other, turns = await forked(
            store,
            engine,
            tools_url,
            parent,
            0,
            messages=[{"role": "user", "content": "And the rug?"}],
            tools_keep_state=True,
        )
    assert tool_log.read_text() == calls
    assert same.final_answer == "7"
    assert (other.status, len(turns)) == ("failed", 1)
    assert "cannot be forked after turn 0: the result of its call to look was not recorded" in str(
        other.error
    )


async def test_of_an_agents_rollout_one_reply_is_sampled(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        record, turns = await forked(store, engine, tools_url, parent, 1, by_agent=True)
    assert (record.status, record.score, len(turns)) == ("finished", None, 2)
    assert np.array_equal(rebuild_prompts(turns)[1], rebuild_prompts(parent)[1])
    assert "a single reply" in str(record.error)


async def test_a_try_whose_player_dies_is_given_up_by_the_next_fork(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        dead = await store_fork(
            store,
            Fork(id="fork:x@0-0", record_id=PARENT, attempt=1, task_id="", turn=0, version=0),
            TASK,
            1,
        )
        claimed = await store.forked.records.claim(
            "gone", lease_seconds=0.01, admitted_groups=9, max_attempts=1, task_id=dead.id
        )
        assert claimed is not None
        await asyncio.sleep(0.05)
        await forked(store, engine, tools_url, parent, 1)
    lost = await store.forked.records.get("fork:x@0-0/0")
    assert lost is not None
    assert lost.status == "failed"


async def test_an_interrupted_fork_leaves_no_try_that_seems_to_go_on(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
        engine.gate = threading.Event()
        playing = asyncio.create_task(
            forked(store, engine, tools_url, parent, 1, num_tries=3, max_running=2)
        )
        while len(engine.requests) < 4:  # two of the parent, two of the fork
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        engine.gate.set()
    tries = [one async for one in store.forked.records.find()]
    assert [(one.status, one.error) for one in tries] == [("failed", "interrupted")] * 3


async def test_turns_that_are_not_there_or_not_the_policys_are_refused(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, script) as engine:
        parent = await played(store, engine, tools_url)
    with pytest.raises(ConfigError, match="--turn 2: the record has turns 0 to 1"):
        check_fork_turn(parent, 2)
    with pytest.raises(ConfigError, match="no turns yet"):
        check_fork_turn([], 0)
    with pytest.raises(ConfigError, match="--turn 0 is a call of gpt"):
        check_fork_turn([parent[0].model_copy(update={"trainable": False, "model": "gpt"})], 0)

"""What is said while an evaluation goes on."""

import asyncio
import io

import pytest
from rich.console import Console
from support.stored import claim, make_task, play

from agentrl.launcher import evaluation_run
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


async def test_an_evaluation_says_how_far_it_is(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_run, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(evaluation_run, "QUIET_SECONDS", 0.01)
    await store.runs.create(Run(name=store.database_name))
    tasks = [make_task(n, split="eval", tag="eval@0", num_generations=1) for n in range(2)]
    await store.tasks.add(tasks)
    text = io.StringIO()
    following = asyncio.create_task(evaluation_run.follow(Console(file=text, width=80), store))
    try:
        for words in ("0 of 2 questions answered", "1 of 2 questions answered"):
            async with asyncio.timeout(20):
                while words not in text.getvalue():
                    await asyncio.sleep(0.01)
            await play(store, await claim(store), score=1.0)
    finally:
        following.cancel()

"""What the console says while a run goes on."""

import pytest
from support.stored import claim, make_task, play

from agentrl.launcher import run_warnings
from agentrl.launcher.run_warnings import RunWarnings
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_warnings, "LOOK_SECONDS", 0.0)


async def test_every_trouble_is_said_once(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add(make_task(number, num_generations=1) for number in range(8))
    warnings = RunWarnings(store)
    assert await warnings.new() == []

    record = await play(store, await claim(store), score=None)
    await store.scores.fail(record.id, record.fence, "scorer 'close' failed: ValueError (s.py:3)")
    record = await play(store, await claim(store), score=None)
    await store.scores.postpone(record.id, record.fence, "ScoringError: no judge", 60)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "tools are away", 1)
    said = await warnings.new()
    assert [text.partition(":")[0] for text in said] == [
        "a scorer fails, its records have no score",
        "a score is missing and tried again",
        "1 records failed",
    ]
    assert "train/0/q0/0: answered '4', no score (scorer 'close' failed" in said[0]
    assert "(s.py:3)" in said[0]
    assert "no judge" in said[1]

    ids = [(await play(store, await claim(store), score=0.0)).id for _ in range(4)]
    assert await warnings.new() == []
    await store.trainer_leases.acquire("trainer", "me", 60)
    await store.ledger.drop("trainer", ids, 1, "zero_variance")
    (said_of_signal,) = await warnings.new()
    assert "4 of 4 groups had equal scores (mean 0.000)" in said_of_signal
    assert said_of_signal.count("score 0\n") == 3
    assert await warnings.new() == []

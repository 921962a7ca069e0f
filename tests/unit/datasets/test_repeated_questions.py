"""Which questions a later epoch asks, by what the trainer made of their groups before."""

from collections.abc import Iterator, Sequence

import pytest
from support.stored import claim, make_task, play

from agentrl.config.rules import broken_rules
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.datasets.question import Question
from agentrl.datasets.task_feed import RepeatedQuestions, TaskFeed
from agentrl.datasets.task_stream import append_tasks, tasks_from_questions
from agentrl.schema import MCPTask, Task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore

NAMES = [f"q{number}" for number in range(20)]


def tasks_of(epoch: int, names: Sequence[str] = NAMES) -> Iterator[MCPTask]:
    questions = [
        Question(name, f"{name}?", 4, (), "exact", "answer", system_prompt="") for name in names
    ]
    return tasks_from_questions(questions, "train", epochs=(epoch,), num_generations=2)


async def consume(store: TrajectoryStore, epoch: int, reasons: dict[str, str | None]) -> None:
    """Play an epoch; the trainer drops the groups that have a reason, and trains on the others."""
    await append_tasks(store, tasks_of(epoch, [*reasons]))
    for _ in range(2 * len(reasons)):
        await play(store, await claim(store))
    for name, reason in reasons.items():
        ids = [record.id for record in await store.records.of_task(f"train/{epoch}/{name}")]
        if reason is None:
            await store.ledger.reserve(DEFAULT_CONSUMER, ids, epoch + 1)
        else:
            await store.ledger.drop(DEFAULT_CONSUMER, ids, epoch + 1, reason)


async def asked(store: TrajectoryStore, probability: float, epoch: int) -> list[str]:
    chosen = await RepeatedQuestions(store, probability, seed=7)([*tasks_of(epoch)])
    return [task.dataset_id for task in chosen if isinstance(task, MCPTask)]


async def test_only_questions_that_taught_nothing_are_left_out(store: TrajectoryStore) -> None:
    known = {"q0": "zero_variance", "q1": None, "q2": "stale", "q3": "no_score"}
    await consume(store, 0, known)
    assert await asked(store, 0.0, 1) == [name for name in NAMES if name != "q0"]
    assert await asked(store, 0.0, 0) == NAMES  # nothing is known before the first epoch
    assert await asked(store, 1.0, 1) == NAMES


async def test_the_last_group_that_was_trained_on_clears_what_was_before(
    store: TrajectoryStore,
) -> None:
    await consume(store, 0, {"q0": "zero_variance", "q1": "zero_variance", "q2": None})
    # A later group that says nothing leaves what is known as it was.
    await consume(store, 1, {"q0": None, "q1": "stale", "q2": "zero_variance"})
    left_out = set(NAMES) - set(await asked(store, 0.0, 2))
    assert left_out == {"q1", "q2"}


async def test_the_chance_halves_with_every_group_in_a_row(store: TrajectoryStore) -> None:
    shares = []
    for epoch in range(3):
        await consume(store, epoch, dict.fromkeys(NAMES, "zero_variance"))
        draws = [
            task
            for seed in range(50)
            for task in await RepeatedQuestions(store, 0.5, seed)([*tasks_of(epoch + 1)])
        ]
        shares.append(len(draws) / (50 * len(NAMES)))
    assert shares == pytest.approx([0.5, 0.25, 0.125], abs=0.05)
    assert await asked(store, 0.5, 3) == await asked(store, 0.5, 3)


async def test_a_question_comes_back_after_eight_epochs(store: TrajectoryStore) -> None:
    await consume(store, 0, {"q0": "zero_variance"})
    assert [("q0" in await asked(store, 0.0, epoch)) for epoch in (1, 8, 9)] == [False, False, True]


async def test_the_feed_reads_on_for_questions_that_are_left_out(store: TrajectoryStore) -> None:
    await consume(store, 0, dict.fromkeys(NAMES[:15], "zero_variance"))

    def further() -> Iterator[Task]:
        yield from tasks_of(1)
        yield from map(make_task, range(100, 103))  # of another source, without epochs before

    feed = TaskFeed(store, further(), RepeatedQuestions(store, 0.0, seed=7))
    await feed.fill(17)
    tasks = [task async for task in store.tasks.find()]
    assert [task.id for task in tasks[15:17]] == ["train/1/q15", "train/1/q16"]
    await feed.fill(1000)
    assert [task.order async for task in store.tasks.find()] == [*range(15 + 5 + 3)]


@pytest.mark.parametrize("repeat", [0.0, 0.5])
def test_groups_that_are_never_dropped_are_refused(repeat: float) -> None:
    section = AlgorithmSection(recipe="rloo", repeat_equal_probability=repeat)
    (problem,) = broken_rules(RootConfig(algorithm=section))
    assert "--min_score_spread" in problem
    section = AlgorithmSection(repeat_equal_probability=repeat)
    assert not [*broken_rules(RootConfig(algorithm=section))]

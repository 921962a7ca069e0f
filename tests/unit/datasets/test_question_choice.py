"""Which questions a run asks next, by the results of their groups."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from random import Random

import pytest
from support.stored import claim, make_task, play

from agentrl.datasets.question import Question
from agentrl.datasets.question_choice import QuestionChoice, chance_to_differ
from agentrl.datasets.task_feed import TaskFeed, TasksInOrder
from agentrl.datasets.task_stream import tasks_from_questions
from agentrl.schema import MCPTask, Task
from agentrl.store import TrajectoryStore

GENERATIONS = 4


def questions(tagged: Mapping[str, Sequence[str]]) -> list[Question]:
    return [
        Question(name, f"{name}?", 4, (), "exact", "answer", system_prompt="", tags=(tag,))
        for tag, names in tagged.items()
        for name in names
    ]


def stream(asked: list[Question], num_epochs: int = 1) -> Iterator[MCPTask]:
    return tasks_from_questions(
        asked, "train", epochs=range(num_epochs), num_generations=GENERATIONS
    )


async def solve(store: TrajectoryStore, chances: dict[str, float], seed: int = 0) -> None:
    """Play all groups; a rollout succeeds with the chance of its question's tag."""
    draw = Random(seed)
    while await store.tasks.count(status="created"):
        claimed = await claim(store)
        task = await store.tasks.get(claimed.task_id)
        assert isinstance(task, MCPTask)
        await play(store, claimed, score=float(draw.random() < chances[task.tags[0]]))


async def in_store(store: TrajectoryStore) -> list[MCPTask]:
    return [task async for task in store.tasks.find(split="train") if isinstance(task, MCPTask)]


def test_the_chance_to_differ_is_that_of_drawn_groups() -> None:
    draw = Random(3)
    for successes, failures, size in ((1, 1, 8), (7, 3, 4), (0.4, 12, 8)):
        rates = [draw.betavariate(successes, failures) for _ in range(40_000)]
        groups = ({draw.random() < rate for _ in range(size)} for rate in rates)
        share = sum(len(group) == 2 for group in groups) / len(rates)
        assert chance_to_differ(successes, failures, size) == pytest.approx(share, abs=0.01)


async def test_questions_whose_tags_teach_are_asked_first(store: TrajectoryStore) -> None:
    tagged = {tag: [f"{tag}{n}" for n in range(40)] for tag in ("never", "half", "always")}
    asked = questions(tagged)
    Random(1).shuffle(asked)
    chances = {"never": 0.0, "half": 0.5, "always": 1.0}
    feed = TaskFeed(store, QuestionChoice(store, stream(asked), groups_per_step=8, seed=1))
    for num_groups in range(6, 61, 6):
        await feed.fill(num_groups)
        await solve(store, chances, seed=num_groups)
    tasks = await in_store(store)
    late = [task.tags[0] for task in tasks[24:]]
    assert late.count("half") >= 0.6 * len(late)  # in order, a third
    assert {*late} == {"half", "never", "always"}  # none is given up
    assert tasks[0].expected_signal == 0.5
    assert all(task.expected_signal for task in tasks)


async def test_what_was_solved_comes_back_when_its_result_is_old(store: TrajectoryStore) -> None:
    asked = questions({"half": list("abcdefgh"), "always": ["solved"]})
    choice = QuestionChoice(store, stream(asked, num_epochs=40), groups_per_step=8, seed=1)
    feed = TaskFeed(store, choice)
    for num_groups in range(9, 181, 3):
        await feed.fill(num_groups)
        await solve(store, {"half": 0.5, "always": 1.0}, seed=num_groups)
    orders = [task.order for task in await in_store(store) if task.dataset_id == "solved"]
    assert 3 <= len(orders) <= 12  # in order, 20
    assert min(second - first for first, second in pairwise(orders)) >= 4
    ids = [task.id for task in await in_store(store)]
    assert len({*ids}) == len(ids)
    assert "train/2/solved" in ids


async def test_as_many_are_asked_as_the_stream_has_also_after_a_restart(
    store: TrajectoryStore,
) -> None:
    asked = questions({"half": [f"q{n}" for n in range(5)]})
    for num_groups in (3, 8, 1000, 1000):  # each by a process of its own
        choice = QuestionChoice(store, stream(asked, num_epochs=3), groups_per_step=1, seed=1)
        await TaskFeed(store, choice).fill(num_groups)
        assert len(await in_store(store)) == min(num_groups, 15)
    assert {task.dataset_id for task in await in_store(store)} == {one.id for one in asked}


async def test_tasks_of_other_kinds_are_asked_once_as_they_are(store: TrajectoryStore) -> None:
    tasks = chain(stream(questions({"half": ["a"]})), (Task(id=f"own/{n}") for n in range(3)))
    await TaskFeed(store, QuestionChoice(store, tasks, groups_per_step=1, seed=1)).fill(9)
    found = [task.id async for task in store.tasks.find()]
    assert sorted(found) == ["own/0", "own/1", "own/2", "train/0/a"]


async def test_in_order_each_task_is_added_once(store: TrajectoryStore) -> None:
    found: list[str] = []
    for num_groups in (3, 5, 1000):
        await TaskFeed(store, TasksInOrder(map(make_task, range(7)))).fill(num_groups)
        found = [task.id async for task in store.tasks.find()]
        assert found == [make_task(number).id for number in range(len(found))]
        assert min(num_groups, 7) <= len(found) <= num_groups + 1
    assert len(found) == 7

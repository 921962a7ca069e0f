import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import DataSection
from agentrl.datasets.task_stream import eval_tasks, train_tasks


def write_lines(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_every_question_is_asked_once_in_each_epoch_in_a_new_order(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", *({"id": str(k), "q": f"Q{k}"} for k in range(20)))
    config = DataSection(train_file=path, num_train_epochs=2, num_generations=4)
    tasks = list(train_tasks(config, seed=1))
    assert [task.order for task in tasks] == list(range(40))
    first, second = [task.dataset_id for task in tasks[:20]], [t.dataset_id for t in tasks[20:]]
    assert sorted(first) == sorted(second) == sorted(str(k) for k in range(20))
    assert first != second
    assert tasks[0].id == f"train/0/{first[0]}"
    assert {task.num_generations for task in tasks} == {4}
    other = [task.dataset_id for task in train_tasks(config, seed=2)]
    assert other[:20] != first


@pytest.mark.parametrize(
    ("fields", "rounds"),
    [
        ({}, ()),
        ({"rollouts": "tree"}, (4, 4)),
        ({"rollouts": "tree", "tree_roots": 2, "tree_branches": 3}, (2, 3, 3)),
        ({"rollouts": "tree", "tree_branches": 3}, (4, 3, 1)),
        ({"rollouts": "tree", "num_generations": 2}, (1, 1)),
    ],
)
def test_training_questions_carry_the_rounds_of_their_groups(
    tmp_path: Path, fields: dict[str, Any], rounds: tuple[int, ...]
) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"id": "a", "q": "Q"})
    config = DataSection(train_file=path, eval_file=path, **fields)
    (task,) = train_tasks(config, seed=1)
    assert task.rounds == rounds
    assert sum(rounds) in (0, task.num_generations)
    assert [one.rounds for one in eval_tasks(config, 1)] == [()]


def test_evaluation_overtakes_training_and_is_tagged_by_version(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"id": "a", "q": "A"}, {"id": "b", "q": "B"})
    tasks = eval_tasks(DataSection(eval_file=path, eval_num_generations=2), version=12)
    assert [task.id for task in tasks] == ["eval/12/a", "eval/12/b"]
    assert [task.order for task in tasks] == [-2, -1]
    assert {task.tag for task in tasks} == {"eval@12"}

import asyncio
import json
from pathlib import Path

import pytest
from support.stored import claim, make_task, play

from agentrl.cli.main import main
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo


async def fill(uri: str, run: str) -> None:
    """One group is scored, one has a dead-lettered try, one is untouched."""
    async with TrajectoryStore.connect(uri, run) as store:
        await store.ensure_schema()
        await store.tasks.add(make_task(number) for number in range(3))
        for _ in range(3):
            await play(store, await claim(store), score=0.5)
        record = await claim(store, max_attempts=1)
        await store.records.fail_attempt(record.id, record.fence, "the tools were away", 1)


def tasks_command(uri: str, run: str, *words: str) -> int:
    return main(["tasks", *words, "--db_connection_string", uri, "--run_name", run])


def test_tasks_are_listed_counted_and_asked_again(
    mongod: EmbeddedMongo, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, run = mongod.uri("x"), "cli_tasks"
    asyncio.run(fill(uri, run))
    assert tasks_command(uri, run, "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "train/0/q0  completed  score 0.500  2 scored",
        "train/0/q1  completed  score 0.500  1 failed, 1 scored",
        "train/0/q2  created  score -  2 pending",
    ]
    tasks_command(uri, run, "stats")
    assert capsys.readouterr().out == (
        "train  2 of 3 tasks completed; rollouts: 3 scored (mean 0.500), 1 failed\n"
    )
    tasks_command(uri, run, "retry", "eval")
    tasks_command(uri, run, "retry")
    tasks_command(uri, run, "retry")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "0"]
    tasks_command(uri, run, "list", "train")
    again = capsys.readouterr().out.splitlines()[-1]
    assert again == "train/0/q1~1  created  score -  2 pending"


def test_ids_from_question_files_neither_steer_the_terminal_nor_stop_a_retry(
    mongod: EmbeddedMongo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, run = mongod.uri("x"), "cli_hostile_ids"
    ids = ["a~abc", "b~", "c~07x~", "d~9", "e\x1b[2J\n\u202e", "f~" + "9" * 30]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"q": "Why?", "answer": 1, "id": i}) + "\n" for i in ids))
    tasks_command(uri, run, "add", "--train_file", str(path), "--num_generations", "1")

    async def fail_all() -> None:
        async with TrajectoryStore.connect(uri, run) as store:
            for _ in ids:
                record = await claim(store, max_attempts=1)
                await store.records.fail_attempt(record.id, record.fence, "away", 1)

    asyncio.run(fail_all())
    capsys.readouterr()
    assert tasks_command(uri, run, "retry") == 0
    assert capsys.readouterr().out == f"retrying {len(ids)} questions\n"
    tasks_command(uri, run, "list", "train")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 * len(ids)
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert "a~abc~1  created" in shown
    assert "d~10  created" in shown


def test_questions_are_added_once(
    mongod: EmbeddedMongo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"q": "Why?", "answer": 1, "scorer": "exact"}) + "\n")
    for _ in range(2):
        tasks_command(mongod.uri("x"), "cli_added", "add", "--train_file", str(path))
    said = capsys.readouterr().out.splitlines()
    assert [line[0] for line in said if "new task" in line] == ["1", "0"]
    assert sum(line.startswith("first question of ") for line in said) == 2


def test_a_file_that_cannot_be_added_leaves_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", "add", "--train_file", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl: No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


async def orders(uri: str, run: str) -> list[tuple[str, int, int]]:
    async with TrajectoryStore.connect(uri, run) as store:
        return [
            (task.id, task.order, len(await store.records.of_task(task.id)))
            async for task in store.tasks.find()
        ]


def test_questions_of_a_second_file_go_to_the_end_of_the_stream(
    mongod: EmbeddedMongo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, run, path = mongod.uri("x"), "cli_second", tmp_path / "d.jsonl"

    def add(*ids: str, num_generations: int) -> str:
        lines = [json.dumps({"id": i, "q": i, "answer": 1, "scorer": "exact"}) for i in ids]
        path.write_text("\n".join(lines))
        path.with_suffix(".yaml").write_text("advanced:\n  shuffle: false\n")
        flags = ("--train_file", str(path), "--config", str(path.with_suffix(".yaml")))
        assert tasks_command(uri, run, "add", *flags, f"--num_generations={num_generations}") == 0
        *first_question, added = capsys.readouterr().out.splitlines(keepends=True)
        assert "first question of" in first_question[0]
        return str(added)

    assert add("a", "b", num_generations=1).startswith("2 new tasks")
    said = add("c", "a", "b", "d", num_generations=2)
    assert said == "2 new tasks in 'cli_second'; 2 existed already\n"
    # What was there keeps its place and its slots; no position is left empty.
    assert asyncio.run(orders(uri, run)) == [
        ("train/0/a", 0, 1),
        ("train/0/b", 1, 1),
        ("train/0/c", 2, 2),
        ("train/0/d", 3, 2),
    ]


def test_another_question_under_a_known_id_is_refused_and_nothing_is_overwritten(
    mongod: EmbeddedMongo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, run = mongod.uri("x"), "cli_collision"
    statuses = []
    for name, question in (("one", "What is A?"), ("two", "What is B?")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"q": question, "answer": 1, "scorer": "exact"}))
        statuses.append(tasks_command(uri, run, "add", "--train_file", str(path)))
    assert statuses[-1] == 2
    said = capsys.readouterr()
    assert said.out.count("1 new tasks") == 1
    assert "id 'line1' already belongs to another question of the run, 'What is A?'" in said.err
    assert len(asyncio.run(orders(uri, run))) == 1


@pytest.mark.parametrize("action", ["list", "retry", "stats"])
def test_a_run_name_without_tasks_is_one_line(
    mongod: EmbeddedMongo, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert tasks_command(mongod.uri("x"), "cli_no_such_run", action) == 2
    said = capsys.readouterr().err
    assert "contains no tasks (--run_name)" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        *([], ["drop"], ["add", "train"], ["list", "trian"], ["list", "train", "eval"]),
        *(["--run_name", "x", "list"], ["add"], ["train", "list"]),
    ],
)
def test_what_tasks_cannot_do_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1

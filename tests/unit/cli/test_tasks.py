import asyncio
import json
from pathlib import Path

import pytest
from support.stored import claim, make_task, play

from agentrl.cli.main import main
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo


async def fill(uri: str, run: str) -> None:
    """One group is scored, one has a parked try, one is untouched."""
    async with TrajectoryStore.connect(uri, run) as store:
        await store.ensure_schema()
        await store.add_tasks(make_task(number) for number in range(3))
        for _ in range(3):
            await play(store, await claim(store), score=0.5)
        record = await claim(store, max_attempts=1)
        await store.fail_attempt(record.id, record.fence, "the tools were away", 1)


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
        "train  2 of 3 tasks completed, mean score 0.500 over 3 tries, 1 tries parked\n"
    )
    tasks_command(uri, run, "retry", "eval")
    tasks_command(uri, run, "retry")
    tasks_command(uri, run, "retry")
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "0"]
    tasks_command(uri, run, "list", "train")
    again = capsys.readouterr().out.splitlines()[-1]
    assert again == "train/0/q1~1  created  score -  2 pending"


def test_questions_are_added_once(
    mongod: EmbeddedMongo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"q": "Why?", "answer": 1, "scorer": "exact"}) + "\n")
    for _ in range(2):
        tasks_command(mongod.uri("x"), "cli_added", "add", "--train_file", str(path))
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["1", "0"]


@pytest.mark.parametrize("words", [[], ["drop"], ["add", "train"], ["list", "trian"]])
def test_what_tasks_cannot_do_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1

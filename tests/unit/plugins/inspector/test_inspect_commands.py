"""`agentrl inspect`, through its command line, on a database and on a private mongod's data."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stored import SYSTEM, claim, make_task, make_turn, play

from agentrl.cli.main import main
from agentrl.schema import (
    InferenceService,
    Policy,
    Run,
    SamplerInfo,
    Score,
    Seat,
    ToolCall,
    ToolResult,
    TurnTraining,
    TurnWorth,
)
from agentrl.schema.run import RunStatus
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

RECORD = "train/0/q0/0"


async def fill_run(uri: str, name: str, *, status: RunStatus = "completed") -> None:
    """A small run: one record with a tool call that step 1 trained, one that it dropped."""
    async with TrajectoryStore.connect(uri, name) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=name))
        await store.tasks.add([make_task(0)])
        record = await claim(store, "host:1:aa")
        call = ToolCall(id="c", name="lookup", arguments={"q": "[red]lamp"})
        turn = make_turn(record, 0, text="I look \x1b[31mit up", tool_calls=[call])
        await store.turns.append(turn, record.fence)
        result = ToolResult(call_id="c", name="lookup", content="4 euro")
        await store.turns.set_tool_results(turn.id, record.id, record.fence, [result])
        await store.records.fail_attempt(record.id, record.fence, "the server [bold]left", 3)
        record = await claim(store)
        await store.turns.append(
            turn.model_copy(
                update={"id": f"{record.id}/{record.fence}/0", "attempt": record.attempt}
            ),
            record.fence,
        )
        await store.turns.set_tool_results(
            f"{record.id}/{record.fence}/0", record.id, record.fence, [result]
        )
        await store.turns.append(make_turn(record, 1), record.fence)
        earned = {f"{record.id}/{record.fence}/1": -0.25}
        seats = {f"{record.id}/{record.fence}/1": Seat(name="left", stint=1, reward=0.5)}
        await store.turns.set_rewards(earned, record.id, record.fence, seats=seats)
        await store.records.finish(
            record.id,
            record.fence,
            outcome="answered",
            final_answer="4",
            lease_seconds=60,
            metrics={"moves": 3.0},
        )
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=1.0))
        await play(store, await claim(store), score=0.0)
        await store.ledger.reserve("trainer", [RECORD], 1)
        await store.ledger.drop("trainer", ["train/0/q0/1"], 1, "zero_advantage")
        await store.ledger.commit("trainer", 1)
        await store.ledger.put_turn_trainings(
            [
                TurnTraining(
                    id=f"trainer/{step}/train/0/q0/1/1/{turn}",
                    consumer="trainer",
                    step=step,
                    turn_id=f"train/0/q0/1/1/{turn}",
                    record_id="train/0/q0/1",
                    task_id="train/0/q0",
                    num_tokens=7,
                    num_trained_tokens=trained,
                    advantage=advantage,
                    worth=TurnWorth(
                        after=0.25, change=advantage, num_leaves=2, is_decision=step == 2
                    ),
                    staleness=0,
                )
                for step, turn, trained, advantage in (
                    (1, 0, 7, -0.25),
                    (2, 0, 7, -0.75),
                    (3, 0, 0, -2.0),
                )
            ]
        )
        await store.figures.put_step("trainer", {"step": 1, "reward_mean": 0.5})
        await store.policies.publish(Policy(version=1, path="p/1", checksum="ab", num_bytes=1))
        await store.samplers.register(SamplerInfo(id="host:1:aa", host="host", pid=1))
        await store.services.register(
            InferenceService(
                id="engine_0", base_url="http://h:1", backend="embedded", model_path="m"
            )
        )
        await store.runs.set_status(status)


@pytest.fixture
def inspect(
    mongo_uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run `agentrl inspect` on a filled database; returns what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    # Not the form of the private mongod's own addresses: this stands for a user's database.
    uri = mongo_uri.replace("&journal=true", "")
    asyncio.run(fill_run(uri, name))

    def call(*words: str, code: int = 0) -> str:
        flags = ["--run_name", name, "--db_connection_string", uri]
        assert main(["inspect", *words, *flags]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return call


SEARCHES: list[tuple[list[str], list[int]]] = [
    ([], [1, 0]),
    (["--score", ">=0.5"], [0]),
    (["--score", "<=1"], [1, 0]),
    (["--score", "1"], [0]),
    (["--score", "0..0.5"], [1]),
    (["--score", "none"], []),
    (["--outcome", "answered"], [1, 0]),
    (["--outcome", "no_answer"], []),
    (["--tool", "lookup"], [0]),
    (["--tool", "compute"], []),
    (["--step", "1"], [1, 0]),
    (["--step", "2"], []),
    (["--search", "4 EURO"], [0]),  # a tool's result
    (["--search", "look \x1b[31mit"], [0]),  # a reply
    (["--search", "item 0 COST?"], [1, 0]),  # the question
    (["--search", "a.b*("], []),
    (["--column", "shelf=0"], [1, 0]),
    (["--column", "shelf=1"], []),
    (["--limit", "1"], [1]),
    (["--score", ">=0", "--tool", "lookup", "--search", "euro", "--column", "shelf=0"], [0]),
]


@pytest.mark.parametrize(("flags", "numbers"), SEARCHES)
def test_records_are_found_by_what_came_of_them(
    inspect: Callable[..., str], flags: list[str], numbers: list[int]
) -> None:
    found = json.loads(inspect("records", *flags, "--json"))
    assert [record["traj_id"] for record in found] == numbers


def test_the_list_of_records_names_them_and_says_that_there_may_be_more(
    inspect: Callable[..., str],
) -> None:
    page = inspect("records", "--limit", "2")
    assert re.search(r"train/0/q0/0 +scored +1\.000 +answered +0\.\.0 +14 +1 +4", page)
    assert "showing the first 2; --limit N shows more" in page
    assert inspect("records", "--tool", "compute") == "no record matches\n"


def test_a_record_in_full_has_everything_that_the_model_was_given(
    inspect: Callable[..., str],
) -> None:
    short, full = inspect("record", RECORD), inspect("record", RECORD, "--full")
    assert SYSTEM.strip() not in short
    assert SYSTEM.strip() in full
    assert '"description": "Looks a price up. Looks a price up.' in full
    turn = json.loads(inspect("record", RECORD, "--full", "--json"))["turns"][0]
    assert f"added ids  {' '.join(map(str, turn['added_ids']))}\n" in full
    assert f"sampled ids  {' '.join(map(str, turn['output_ids']))}\n" in full
    assert (len(turn["added_ids"]), len(turn["output_logprobs"])) == (100, 7)
    assert "\x1b" not in full


def test_a_record_is_told_turn_by_turn(inspect: Callable[..., str]) -> None:
    page = inspect("record", RECORD)
    for part in (
        "What does item 0 cost?",
        "1.000 by exact 1",
        "turn 0 · 100 + 7 tokens · v0x7 · stop · 1 behind the run",
        'call  lookup {"q": "[red]lamp"}',
        "result  4 euro",
        "I look \\x1b[31mit up",
        "trained at step 1; trained at 1",
        "the server [bold]left",
        "<answer>4</answer>",
        'columns  {"shelf": 0}',
        "metrics  moves 3.000",
        " · seat left, stint 1 earned 0.500 · reward -0.250",
    ):
        assert part in page
    story = json.loads(inspect("record", RECORD, "--json"))
    assert story["record"]["score"]["value"] == 1.0
    assert [turn["num_output_tokens"] for turn in story["turns"]] == [7, 7]
    assert story["turns"][0]["staleness"] == 1
    assert story["turns"][0]["tool_results"][0]["content"] == "4 euro"
    assert [a["ended_by"] for a in story["record"]["attempts"]] == ["error", "finished"]
    assert story["ledger"]["trainer"]["trained_at"] == [1]
    first = json.loads(inspect("record", RECORD, "--attempt", "1", "--json"))
    assert (first["attempt"], len(first["turns"])) == (1, 1)


def test_every_other_page_has_its_rows_and_its_json(inspect: Callable[..., str]) -> None:
    assert RECORD in inspect("failures")
    (failure,) = json.loads(inspect("failures", "--json"))
    assert failure["last_error"] == "the server [bold]left"
    assert "host:1:aa" in inspect("samplers")
    assert json.loads(inspect("samplers", "--json"))[0]["id"] == "host:1:aa"
    assert "engine_0" in inspect("servers")
    assert json.loads(inspect("servers", "--json"))[0]["base_url"] == "http://h:1"
    worst = json.loads(inspect("turns", "--by", "credit", "--json"))
    assert [(turn["step"], turn["credit"]) for turn in worst] == [(2, -0.75), (1, -0.25)]
    assert re.search(
        r"train/0/q0/1 +0 +-0\.750 +2", inspect("turns", "--by", "credit", "--limit", "1")
    )
    page = inspect("step", "1")
    assert "version 1 in p/1" in page
    assert "dropped: zero_advantage" in page
    (reward,) = [line for line in page.splitlines() if line.startswith("Reward, mean")]
    assert re.fullmatch(r"Reward, mean +[\d.]+ +score +Mean score of the rollouts .*", reward)
    step = json.loads(inspect("step", "1", "--json"))
    assert [one["record_id"] for one in step["trained"]] == [RECORD]
    assert step["figures"]["step"] == 1
    assert step["trained"][0]["turns"][0]["tool_calls"][0]["name"] == "lookup"
    assert "1 of 1 complete, 1 consumed" in inspect("progress")
    view = json.loads(inspect("progress", "--json"))
    assert view["progress"]["records"] == {"scored": 2}
    # A run that has ended is followed to its end at once; without a terminal, line by line.
    assert inspect("progress", "--follow").startswith("completed  version 1  groups 1/1")
    assert view["summary"]["name"] in inspect("runs")
    names = [run["name"] for run in json.loads(inspect("runs", "--json"))]
    assert view["summary"]["name"] in names


MISTAKES: list[tuple[list[str], str, int]] = [
    ([], "one of runs, progress, records, record", 2),
    (["recrd"], "unknown command 'recrd'; one of runs", 2),
    (["record"], "missing argument 'RECORD_ID'", 2),
    (["records", "--score", "good"], "'good' is not a condition on a score; give '>=0.5'", 2),
    (["records", "--score", ">="], "give '>=0.5', '<0.2', 1, 0.2..0.8, or none", 2),
    (["records", "--outcome", "bad"], "'bad' is not one of 'answered', 'no_answer'", 2),
    (["samplers", "--follow"], "has no --follow, but `agentrl inspect progress` does", 2),
    (["failures", "--limit", "none"], "'--limit': 'none' is not a valid whole number", 2),
    (["failures", "--limit", "0"], "0 is not in the range x>=1", 2),
    (["failures", "--limit"], "--limit needs a value", 2),
    (["record", "a", "b"], "unexpected argument 'b'; usage: agentrl inspect record RECORD_ID", 2),
    (["--run_name", "x", "progress"], "failures, samplers, audit, servers, then --run_name", 2),
    (["step", "one"], "'STEP': 'one' is not a valid whole number", 2),
    (["record", "train/0/q9/0"], "ids look like 'train/0/q0/0'", 1),
    (["step", "9"], "consumed no records at step 9", 1),
    (["progress", "--run_nme", "x"], "did you mean --run_name?", 2),
]


def test_the_worst_decisions_are_told_by_worth(inspect: Callable[..., str]) -> None:
    (row,) = json.loads(inspect("turns", "--by", "worth", "--json"))
    assert (row["record_id"], row["index"], row["step"]) == ("train/0/q0/1", 0, 2)
    assert row["worth"] == {"after": 0.25, "change": -0.75, "num_leaves": 2, "is_decision": True}
    table = inspect("turns", "--by", "worth")
    assert re.search(r"-0\.750 +1\.000 +0\.250 +2 +-0\.750 +2 +train/0/q0/1 +0 ", table)
    assert "What does item 0 cost?" in table


def test_a_mistake_costs_one_line(inspect: Callable[..., str]) -> None:
    for words, message, code in MISTAKES:
        error = inspect(*words, code=code)
        assert message in error
        assert error.count("\n") == 1


def test_another_run_name_is_answered_with_those_that_exist(
    mongo_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(uri, name))
    flags = ["--run_name", "nobody", "--db_connection_string", uri]
    assert main(["inspect", "progress", *flags]) == 2
    error = capsys.readouterr().err
    assert "/nobody?" in error
    assert name in error
    assert error.count("\n") == 1


def test_a_finished_run_is_served_for_as_long_as_it_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data_dir = tmp_path / ".agentrl/mongo/demo"
    with EmbeddedMongo(data_dir) as mongo:
        asyncio.run(fill_run(mongo.uri(), "demo"))
        assert main(["inspect", "progress", "--run_name", "demo", "--json"]) == 0  # it runs
    before = json.loads(capsys.readouterr().out)
    config = tmp_path / "config.yaml"
    config.write_text("run_name: demo\n")

    def read(*words: str) -> Any:
        assert main(["inspect", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    after = read("progress", "--config", str(config))
    assert after["progress"] == before["progress"]
    (run,) = read("runs")
    assert (run["name"], run["mean_score"]) == ("demo", 0.5)
    # Nobody serves it any more: the page names the command that does, on the address of before.
    assert run["opened_by"].endswith("agentrl store up --run_name demo")
    assert f"127.0.0.1:{mongo.port}/demo?" in run["uri"]
    assert main(["inspect", "runs"]) == 0
    assert run["opened_by"] in capsys.readouterr().out
    assert main(["tasks", "list", "--run_name", "demo"]) == 0
    assert capsys.readouterr().out == "train/0/q0  completed  score 0.500  2 scored\n"
    for words in (
        "inspect progress --run_name other",
        "fork train/0/q0/0 --turn 0 --run_name other",
        "replay other --step 1",
    ):
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert "no run 'other' here" in error
        assert "(demo)" in error, "a run that is here"
    monkeypatch.setenv("MONGOD_BINARY", "/bin/false")
    assert main(["inspect", "runs"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "", "not that there are none"
    assert ".agentrl/mongo/demo: the private mongod exited during startup (exit 1)" in printed.err

"""`agentrl store`, through its command line."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from support.patience import PATIENCE
from support.stored import fill, make_task

from agentrl.cli.databases import served_uri
from agentrl.cli.main import main
from agentrl.config.loading import load_config
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


async def fill_run(uri: str, name: str) -> None:
    async with TrajectoryStore.connect(uri, name) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=name))
        await fill(store, 1)


def test_a_run_is_measured_exported_imported_and_dropped(
    mongo_uri: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(uri, name))

    def call(*words: str, run: str = name, code: int = 0) -> str:
        assert main(["store", *words, "--run_name", run, "--db_connection_string", uri]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    assert json.loads(call("stats", "--json"))["num_tokens"] == 214
    assert "214 tokens" in call("stats")
    assert f"documents of run '{name}' in copy" in call("export", "copy")
    assert "already exists" in call("export", "copy", code=2)
    assert "'csv' is not one of 'jsonl', 'chat'" in call("export", "x", "--format", "csv", code=2)
    assert "conversations in talks: 2 of train" in call("export", "talks", "--format", "chat")
    copy = f"{name}_copy"
    assert "nowhere is not an export" in call("import", "nowhere", run=copy, code=2)
    assert "talks is not an export" in call("import", "talks", run=copy, code=2)
    assert json.loads(call("import", "copy", "--json", run=copy))["run"] == name
    assert json.loads(call("stats", "--json", run=copy))["num_tokens"] == 214
    question = call("drop", run=copy, code=2)
    assert "with its 1 group, trained to version 0? Standard input is not a terminal" in question
    assert f"deleted database '{copy}'" in call("drop", "--yes", run=copy)
    assert "contains no run" in call("stats", run=copy, code=2)
    assert json.loads(call("compact", "--yes", "--json"))["num_bytes"] == 0


def test_serving_ends_after_the_command_that_joined_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONGODB_URI", raising=False)
    data = tmp_path / ".agentrl/mongo/shown"
    data.mkdir(parents=True)
    command = [sys.executable, "-m", "agentrl", "store", "up", "--run_name", "shown"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = iter(process.stdout or ())
            assert any("Press Ctrl-C to stop it" in line for line in said)
            config = load_config({"run_name": "shown", "mongo_data_dir": str(data)})
            with served_uri(config) as uri:
                process.send_signal(signal.SIGTERM)
                assert next(said).startswith("Another command works on it; it stops after that one")
                with MongoClient[dict[str, Any]](uri) as client:
                    assert client.admin.command("ping")["ok"] == 1
                assert process.poll() is None
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_what_a_killed_import_left_is_dropped(
    mongo_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]

    async def leave() -> None:
        async with TrajectoryStore.connect(uri, name) as store:
            await store.ensure_schema()
            await store.tasks.add([make_task(1)])

    words = ["--run_name", name, "--db_connection_string", uri]
    assert main(["store", "drop", "--yes", *words]) == 2  # there is no such database
    asyncio.run(leave())
    assert main(["inspect", "runs", "--db_connection_string", uri]) == 0
    assert (
        f"database '{name}' has no run: an import that was killed left" in capsys.readouterr().err
    )
    assert main(["store", "stats", *words]) == 2
    capsys.readouterr()
    assert main(["store", "drop", *words]) == 2
    assert "with an unfinished import and no run" in capsys.readouterr().err
    assert main(["store", "drop", "--yes", *words]) == 0
    assert f"deleted database '{name}'" in capsys.readouterr().out
    assert main(["store", "drop", "--yes", *words]) == 2


def test_an_import_begins_a_private_database_only_for_a_whole_export(
    mongo_uri: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(uri, name))
    words = ["--run_name", name, "--db_connection_string", uri]
    assert main(["store", "export", "copy", *words]) == 0
    capsys.readouterr()
    assert main(["store", "import", "nowhere", "--run_name", "demo"]) == 2
    capsys.readouterr()
    assert not (tmp_path / ".agentrl").exists()
    records, manifest = Path("copy/records.jsonl"), Path("copy/manifest.json")
    intact, whole = records.read_text(), manifest.read_text()
    unusable = intact.replace('"value": 1.0', '"value": NaN')
    of_intact, of_unusable = (
        hashlib.sha256(text.encode()).hexdigest() for text in (intact, unusable)
    )
    records.write_text(unusable)
    manifest.write_text(whole.replace(of_intact, of_unusable))
    assert main(["store", "import", "copy", "--run_name", "demo"]) == 2
    told = capsys.readouterr().err
    assert "score.value: Value error, a score must be a finite number, not nan" in told
    assert told.count("\n") == 1
    assert not (tmp_path / ".agentrl/mongo/demo").exists()
    records.write_text(intact)
    manifest.write_text(whole)
    assert main(["store", "import", "copy", "--run_name", "demo"]) == 0
    capsys.readouterr()
    assert main(["store", "stats", "--json", "--run_name", "demo"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 214


def test_only_a_yes_deletes(
    mongo_uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(uri, name))
    answers = iter(["y\n", "\n", "yes\n"])

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return next(answers)

    monkeypatch.setattr(sys, "stdin", Terminal())
    words = ["store", "drop", "--run_name", name, "--db_connection_string", uri]
    for _ in range(2):
        assert main(words) == 2
        assert "nothing was deleted" in capsys.readouterr().err
    assert main(words) == 0
    assert f"deleted database '{name}'" in capsys.readouterr().out


def test_finished_records_are_scored_anew_by_a_scorer_of_the_users(
    mongo_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(uri, name))
    module = tmp_path / "scorers.py"
    module.write_text(
        "from agentrl.rewards import MCPScorerFactory\n"
        "MCPScorerFactory.register_scorer("
        "'of_a_file', lambda answer, truth: len(answer) / 2, version='7')\n"
    )

    def rescore(*words: str) -> int:
        flags = ["--run_name", name, "--db_connection_string", uri, "--scorer_module", str(module)]
        return main(["store", "rescore", *words, *flags])

    assert rescore("--scorer", "of_a_file") == 0
    assert capsys.readouterr().out.startswith("of_a_file@7: 2 records scored, 0 already scored")
    assert rescore("--scorer", "of_a_file") == 0
    assert "0 records scored, 2 already scored" in capsys.readouterr().out
    assert rescore("--scorer", "of_a_fil") == 2
    assert "of_a_file" in capsys.readouterr().err
    assert rescore() == 2
    assert "missing option '--scorer'" in capsys.readouterr().err
    added = [("of_a_file", "7", 0.5)]
    assert asyncio.run(more_scores(uri, name)) == {"train/0/q0/0": added, "train/0/q0/1": added}


async def more_scores(uri: str, name: str) -> dict[str, list[tuple[str, str, float]]]:
    async with TrajectoryStore.connect(uri, name) as store:
        return {
            record.id: [(score.scorer, score.version, score.value) for score in record.more_scores]
            async for record in store.records.find(status="scored")
        }


def test_a_setting_of_an_ended_run_waits_for_its_resume(
    mongo_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = mongo_uri.partition("?")[0].rpartition("/")[2]

    async def end_run() -> None:
        await fill_run(mongo_uri, name)
        async with TrajectoryStore.connect(mongo_uri, name) as store:
            await store.runs.set_status("completed")

    asyncio.run(end_run())
    where = ["--run_name", name, "--db_connection_string", mongo_uri]
    assert main(["store", "set", *where, "max_staleness", "2"]) == 0
    assert "has ended; the change applies when it is resumed" in capsys.readouterr().out


def test_a_setting_may_be_negative_where_its_range_is(
    mongo_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(fill_run(mongo_uri, name))
    where = ["--run_name", name, "--db_connection_string", mongo_uri]
    assert main(["store", "set", *where, "presence_penalty", "-0.5"]) == 0
    assert main(["store", "set", "top_k", "-1", *where]) == 0
    out = capsys.readouterr().out
    assert "top_k null -> -1" in out
    assert "has ended" not in out
    assert main(["store", "set", "max_staleness", "-5", *where]) == 2
    assert capsys.readouterr().err == (
        "agentrl store: max_staleness: Input should be greater than or equal to 0, got -5\n"
    )
    for setting in (
        "max_staleness 9999999999",
        "max_new_tokens 9999999999",
        "temperature Infinity",
    ):
        assert main(["store", "set", *where, *setting.split()]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"agentrl store: {setting.split()[0]}: Input should be "), error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "one of up, set, cordon, uncordon, rescore, stats, export, import, bundle, compact, drop",
        ),
        (["export"], "missing argument 'FOLDER'"),
        (
            ["stats", "--yes"],
            "`agentrl store stats` has no --yes, but `agentrl store compact` does",
        ),
        (["drop", "--run_name", "nobody"], ".agentrl/mongo/nobody does not exist"),
    ],
)
def test_a_mistake_costs_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

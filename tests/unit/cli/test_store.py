"""`agentrl store`, through its command line."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from support.stored import fill

from agentrl.cli.main import main
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo


async def fill_run(uri: str, name: str) -> None:
    async with TrajectoryStore.connect(uri, name) as store:
        await store.ensure_schema()
        await store.create_run(Run(name=name))
        await fill(store, 1)


@pytest.fixture
def private_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of the name `demo` in the working folder."""
    monkeypatch.chdir(tmp_path)
    with EmbeddedMongo(tmp_path / ".agentrl/mongo/demo") as mongo:
        asyncio.run(fill_run(mongo.uri(), "demo"))
    return tmp_path


def test_a_finished_run_is_measured_exported_imported_and_dropped(
    private_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str, run: str = "demo", code: int = 0) -> str:
        assert main(["store", *words, "--run_name", run]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    stats = json.loads(call("stats", "--json"))
    assert stats["num_tokens"] == 214
    assert "214 tokens" in call("stats")
    assert "documents of run 'demo' in copy" in call("export", "copy")
    assert "exists already" in call("export", "copy", code=2)
    assert "--format csv: one of jsonl, parquet" in call("export", "x", "--format", "csv", code=2)
    assert "holds no export" in call("import", "nowhere", run="other", code=2)
    assert not (private_run / ".agentrl/mongo/other").exists()
    assert json.loads(call("import", "copy", "--json", run="other"))["run"] == "demo"
    assert json.loads(call("stats", "--json", run="other"))["num_tokens"] == 214
    question = call("drop", run="other", code=2)
    assert "with its 1 groups, trained to version 0? Nobody is there to be asked" in question
    assert json.loads(call("stats", "--json", run="other"))["num_tokens"] == 214
    assert "'other' is deleted" in call("drop", "--yes", run="other")
    assert "holds no run" in call("stats", run="other", code=1)
    assert json.loads(call("compact", "--yes", "--json"))["num_bytes"] == 0


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
    assert f"database '{name}' is deleted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of up, set, rescore, stats, export, import, compact, drop"),
        (["export"], "takes FOLDER, not nothing"),
        (["stats", "--yes"], "takes no --yes"),
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

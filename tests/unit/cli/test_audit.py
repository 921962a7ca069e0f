import asyncio
import json
from pathlib import Path

import pytest
from support.stored import fill

from agentrl.cli.main import main
from agentrl.runtime.processes.process_identity import this_user
from agentrl.schema import Run, SamplerInfo
from agentrl.store import TrajectoryStore


async def begin(uri: str, name: str) -> None:
    async with TrajectoryStore.connect(uri, name) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name=name))
        await fill(store, 1)
        await store.samplers.register(SamplerInfo(id="box:1:0-a", host="box", pid=1))


async def edit_by_hand(uri: str, name: str) -> None:
    async with TrajectoryStore.connect(uri, name) as store:
        await store.database["runs"].update_one({}, {"$set": {"control.max_staleness": 7}})
        assert await store.runs.audit_control()


def test_who_changed_what_in_a_run_is_listed_and_travels_with_it(
    mongo_uri: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = mongo_uri.replace("&journal=true", "")
    name = mongo_uri.partition("?")[0].rpartition("/")[2]
    asyncio.run(begin(uri, name))

    def call(*words: str, run: str = name) -> str:
        assert main([*words, "--run_name", run, "--db_connection_string", uri]) == 0
        return capsys.readouterr().out

    assert "nobody has changed the run" in call("inspect", "audit")
    call("store", "set", "max_staleness", "3")
    asyncio.run(edit_by_hand(uri, name))
    call("store", "rescore", "--scorer", "exact")
    call("tasks", "retry")
    assert "box:1:0-a claims nothing more" in call("store", "cordon", "box")
    assert "box:1:0-a claims again" in call("store", "uncordon", "box:1")
    call("store", "compact", "--yes")
    call("store", "export", "copy")
    copy = f"{name}_copy"
    call("store", "import", "copy", run=copy)
    entries = json.loads(call("inspect", "audit", "--json", run=copy))
    assert [one["what"] for one in entries] == [
        *("control", "control", "rescore", "retry", "cordon", "uncordon", "compact", "import")
    ]
    assert {one["by"] for one in entries} == {this_user(), "an edit in the database"}
    assert entries[4]["details"] == {"samplers": ["box:1:0-a"]}
    assert "an edit in the database" in call("inspect", "audit", run=copy)

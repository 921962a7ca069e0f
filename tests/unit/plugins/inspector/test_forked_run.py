"""Forks of a real run that has ended: from the command line, and from the record's page."""

import json
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Browser, expect
from support.demo_run import RUN_NAME, config_path, run_command
from unit.plugins.inspector.conftest import opened_inspector, run_elsewhere

from agentrl.schema import DispatchedSamplingTask, Fork, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}
LONG_MS = 300_000


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo of two steps."""
    folder = tmp_path_factory.mktemp("ended")
    command = run_command(folder, max_steps=2)
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return folder


def agentrl(folder: Path, *words: str, status: int = 0) -> str:
    """Run a command on the run and return what it prints, errors last."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *words, "--config", str(config_path(folder))],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


async def _read(uri: str, record_id: str) -> tuple[list[DispatchedSamplingTask], list[Any]]:
    async with TrajectoryStore.connect(uri, RUN_NAME) as store:
        forks: list[Fork] = list(await store.forks.of_task(record_id.rpartition("/")[0]))
        tries = [
            (one, await store.forked.turns.of_record(record.id))
            for one in forks
            for record in await store.forked.records.of_task(one.id)
        ]
        return await store.turns.of_record(record_id), tries


async def _record_of_three_turns(uri: str) -> str:
    async with TrajectoryStore.connect(uri, RUN_NAME) as store:
        wanted = {"outcome": "answered", "turns": {"$size": 3}, "num_tool_calls": 2}
        found = await store.database["records"].find_one(wanted)
        assert found is not None
        return str(found["_id"])


async def _counts(uri: str) -> dict[str, Any]:
    async with TrajectoryStore.connect(uri, RUN_NAME) as store:
        names = ("tasks", "records", "turns", "record_data", "turn_training")
        counts = {name: await store.database[name].count_documents({}) for name in names}
        return {**counts, "ready": len(await store.ledger.ready_groups(limit=999))}


def on_store(folder: Path, work: Any, *given: str) -> Any:
    """Return what `work` reads from the run's database, served for the length of the call."""
    with EmbeddedMongo(folder / "mongo") as mongo:
        reading: Coroutine[Any, Any, Any] = work(mongo.uri(), *given)
        return run_elsewhere(reading)


@pytest.fixture(scope="module")
def record_id(ended: Path) -> str:
    return str(on_store(ended, _record_of_three_turns))


def test_three_forks_of_a_record_keep_its_tokens_and_an_edit_changes_its_answer(
    ended: Path, record_id: str
) -> None:
    before = on_store(ended, _counts)
    for turn in range(3):
        agentrl(ended, "fork", record_id, "--turn", str(turn), "--temperature", "0")
    shown = json.loads(agentrl(ended, "fork", record_id, "--turn", "2", "--show"))
    assert shown["messages"][-1]["role"] == "tool"
    shown["messages"][-1]["content"] = "97"
    (ended / "edit.json").write_text(json.dumps(shown))
    told = agentrl(
        *(ended, "fork", record_id, "--turn", "2", "--temperature", "0"),
        *("--edit", str(ended / "edit.json"), "--version", "0", "--json"),
    )
    parent, tries = on_store(ended, _read, record_id)
    prompts = rebuild_prompts(parent)
    assert [fork.turn for fork, _ in tries] == [0, 1, 2, 2]
    for fork, turns in tries[:3]:
        assert np.array_equal(rebuild_prompts(turns)[fork.turn], prompts[fork.turn])
        for mine, theirs in zip(turns[: fork.turn], parent, strict=False):
            assert np.array_equal(mine.output_ids, theirs.output_ids)
    (_, plain), (fork, edited) = tries[2:]
    assert fork.version == 0
    assert {span.version for span in edited[2].version_spans} == {0}
    assert "97" in edited[2].output_text
    assert edited[2].output_text != plain[2].output_text
    assert json.loads(told.splitlines()[1])["final_answer"] == "97"
    assert on_store(ended, _counts) == before
    assert "trainer" not in agentrl(ended, "inspect", "record", f"{fork.id}/0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nosuch/0", "--turn", "1"), "record 'nosuch/0' does not exist"),
        (("RECORD", "--turn", "9"), "--turn 9: the record has turns 0 to 2"),
        (("RECORD", "--turn", "1", "--version", "77"), "--version 77: no server serves it"),
        (("RECORD", "--turn", "1", "--edit", "no.json"), "--edit no.json: No such file"),
        (("RECORD", "--turn", "1", "--edit", "bad.json"), "not 'mesages'"),
        (("RECORD",), "missing option '--turn'"),
    ],
)
def test_mistakes_are_one_line(
    ended: Path, record_id: str, words: tuple[str, ...], said: str
) -> None:
    (ended / "bad.json").write_text('{"mesages": []}')
    given = [record_id if word == "RECORD" else word for word in words]
    status = 1 if words[0].startswith("nosuch") else 2
    told = agentrl(ended, "fork", *given, status=status).strip()
    assert said in told
    assert "\n" not in told


def test_a_page_forks_a_record_and_shows_the_tries(
    browser: Browser, ended: Path, record_id: str
) -> None:
    flags = ("--config", str(config_path(ended)), "--allow_control")
    with opened_inspector(ended, *flags) as address:
        page = browser.new_page()
        page.set_default_timeout(LONG_MS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        base = address.partition("/runs")[0]
        page.goto(f"{base}/runs/{RUN_NAME}/record?id={quote(record_id, safe='')}")
        turn = page.get_by_role("region", name="Turn 2")
        turn.get_by_role("button", name="Fork here").click()
        form = page.get_by_label("Fork at turn 2")
        form.get_by_label("tool").fill("96")
        form.get_by_label("Temperature").fill("0")
        form.get_by_label("Version").fill("77")
        form.get_by_role("button", name="Continue from here").click()
        expect(page.get_by_role("alert")).to_contain_text("no server serves it", timeout=LONG_MS)
        form.get_by_label("Version").fill("")
        form.get_by_role("button", name="Continue from here").click()
        forks = page.get_by_role("region", name="Forks")
        row = forks.get_by_role("row").filter(has=page.get_by_role("cell", name="96", exact=True))
        expect(row).to_be_visible(timeout=LONG_MS)
        expect(row).to_contain_text("edited messages")
        row.get_by_role("link").last.click()
        expect(page.get_by_text("fork, excluded from training")).to_be_visible()
        expect(page.get_by_text("from the parent record")).to_have_count(2)
        page.get_by_role("link", name=record_id.rpartition("/")[0], exact=True).click()
        expect(page.locator(".node.forked").first).to_be_visible()
        page.close()
    assert problems == []

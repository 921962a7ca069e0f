"""The issue tracker: right calls score 1, words and damage do not, and no world is shared."""

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.doc_blocks import DOCS
from support.patience import PATIENCE

from agentrl.rewards import MCPScorerFactory, Rollout, load_scorer_module
from agentrl.rollout.world import ToolWorld
from agentrl.schema import GroundTruth, Score
from agentrl.tools import McpToolBox, ToolsConfig, connect_tools, load_mcp_servers
from agentrl.tools.servers.served_question import ServedQuestion
from examples.tracker.make_questions import write_questions
from examples.tracker.oracle import Call, right_answer, right_calls, serving

ROOT = DOCS.parent
TRACKER = ROOT / "examples/tracker"
Row = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracker")
    write_questions(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def scorers() -> Iterator[None]:
    before = dict(MCPScorerFactory._scorers)
    load_scorer_module(TRACKER / "scorers.py")  # registers at its first import only
    yield
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


def rows_of(data: Path, *splits: str) -> list[Row]:
    texts = ((data / f"{split}.jsonl").read_text() for split in splits)
    return [json.loads(line) for text in texts for line in text.splitlines()]


def served(row: Row, data: Path) -> ServedQuestion:
    return ServedQuestion(row["id"], f"{row['id']}/0", {}, data)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.db")
    }


@asynccontextmanager
async def tools_of(server: dict[str, Any], example: ServedQuestion) -> AsyncIterator[McpToolBox]:
    servers = load_mcp_servers({"tracker": server})
    config = ToolsConfig(
        servers=servers,
        blocked_tools=("export",),
        example=example,
        connect_timeout_seconds=PATIENCE,  # 300 sessions begin at once
        start_timeout_seconds=PATIENCE,
        call_timeout_seconds=PATIENCE,
    )
    async with connect_tools(config) as box:
        yield box


def damage(row: Row) -> list[Call]:
    spared = [n for n, issue in row["before"].items() if issue == row["after"][n]]
    return [("comment", {"number": int(spared[0]), "text": "oops"})]


async def score(box: McpToolBox, row: Row, data: Path, calls: Iterable[Call], tmp: Path) -> Score:
    async with box.for_rollout(served(row, data)) as tools:
        for tool, arguments in calls:
            result = await tools.call(tool, arguments)
            assert not result.is_error, result.content
        columns = {name: row[name] for name in ("before", "after")}
        truth = GroundTruth(query=row["query"], answer=row["answer"], columns=columns)
        rollout = Rollout("answered", [], columns=columns, world=ToolWorld(tools, tmp))
        scorer = MCPScorerFactory.get_scorer("tracker")
        return await scorer.score(right_answer(row), truth, rollout=rollout)


async def check(box: McpToolBox, rows: list[Row], data: Path, tmp: Path) -> None:
    """Play each question rightly, without acting, and with damage."""
    turn = asyncio.Semaphore(8)

    async def values(row: Row) -> tuple[float, ...]:
        right = right_calls(row)
        async with turn:
            played = [
                await score(box, row, data, calls, tmp)
                for calls in (right, [], [*right, *damage(row)])
            ]
        return tuple(one.value for one in played)

    scored = await asyncio.gather(*map(values, rows))
    for row, found in zip(rows, scored, strict=True):
        acts = row["before"] != row["after"]
        assert found == (1.0, 0.0 if acts else 1.0, 0.5), row["query"]


async def test_right_calls_score_1_words_0_and_damage_less(data: Path, tmp_path: Path) -> None:
    rows = rows_of(data, "train")[:20]
    assert len({row["tags"][0] for row in rows}) == 20
    before = digests(data)
    with serving(data / "worlds") as url:
        server = {"url": url, "per_rollout": True}
        async with tools_of(server, served(rows[0], data)) as box:
            assert "export" not in {spec.name for spec in box.specs}
            assert (await box.call("export", {})).is_error
            await check(box, rows, data, tmp_path)
    assert digests(data) == before


@pytest.mark.slow
async def test_the_oracle_is_right_on_all_questions(data: Path, tmp_path: Path) -> None:
    rows = rows_of(data, "train", "eval")
    assert len(rows) == 360
    with serving(data / "worlds") as url:
        async with tools_of({"url": url, "per_rollout": True}, served(rows[0], data)) as box:
            await check(box, rows, data, tmp_path)


async def diverged(box: McpToolBox, rows: list[Row], data: Path) -> list[str]:
    """Open a session for each question at once, leave a mark in each, and digest all worlds."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(box.for_rollout(served(r, data))) for r in rows]

        async def marked(tools: McpToolBox, row: Row) -> None:
            number = next(iter(row["before"]))
            await tools.call("comment", {"number": int(number), "text": row["id"]})

        await asyncio.gather(*map(marked, opened, rows))
        found = []
        for tools, row in zip(opened, rows, strict=True):
            state = json.loads((await tools.call_for_scorer("export", {})).content)
            comments = next(iter(state.values()))["comments"]
            assert comments.pop() == f"agent: {row['id']}"
            assert state == row["before"]
            found.append(hashlib.sha256(json.dumps(state).encode()).hexdigest())
        return found


@pytest.mark.slow
async def test_300_sessions_of_one_process_share_no_world(data: Path) -> None:
    rows, before = rows_of(data, "train"), digests(data)
    with serving(data / "worlds") as url:
        async with tools_of({"url": url, "per_rollout": True}, served(rows[0], data)) as box:
            assert len({*await diverged(box, rows, data)}) == len(rows) == 300
    assert digests(data) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_commands_of_the_example_work_on_copies_of_their_own(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    server = json.loads((TRACKER / "servers.json").read_text())["mcpServers"]["tracker"]
    rows, before = rows_of(data, "train")[:20], digests(data)
    async with tools_of(server, served(rows[0], data)) as box:
        for start in range(0, len(rows), 5):
            batch = rows[start : start + 5]
            assert len({*await diverged(box, batch, data)}) == len(batch)
            row = batch[0]
            assert (await score(box, row, data, right_calls(row), tmp_path)).value == 1.0
    assert digests(data) == before


@pytest.mark.slow
def test_the_page_works_as_printed_up_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    section = (DOCS / "gallery.md").read_text().partition("## An issue tracker")[2]
    commands = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0].splitlines()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    demo = f" --dry_run --model_name_or_path {ROOT / 'assets/demo/model'}"
    printed = ""
    for command in commands:
        text = command + (demo if command.startswith("agentrl") else "")
        done = subprocess.run(
            text,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert printed.count(" ok\n") >= 10

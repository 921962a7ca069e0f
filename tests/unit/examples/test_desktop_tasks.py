"""Each desktop task is done by its actions on the real display, and by nothing else."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from harness.scripted_engine import serve_script
from harness.tiny_tokenizer import write_seeing_tokenizer
from mcp import Client
from mcp.types import TextContent
from support.doc_blocks import DOCS
from support.patience import PATIENCE
from support.play import begin_run, claim, open_play, tool_call

from agentrl.config.sections import RolloutSection
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout.worker import scheduler
from agentrl.schema import GroundTruth, MCPTask
from agentrl.store import TrajectoryStore
from examples.desktop.display import NEEDED, NEEDED_FOR_FILES, Display
from examples.desktop.end_state import unmet
from examples.desktop.server import desktop_server

# The module registers its sampler for all tasks of the process; other tests run theirs as before.
with patch.dict(scheduler._SAMPLERS):
    from examples.desktop.tasks import DesktopSampler, desktop_scorer

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in (*NEEDED, *NEEDED_FOR_FILES)),
    reason="needs a desktop's packages: scripts/install_desktop",
)
DESKTOP = DOCS.parent / "examples/desktop"
TASKS = {
    row["id"]: row for row in map(json.loads, (DESKTOP / "tasks.jsonl").read_text().splitlines())
}
Actions = list[tuple[str, dict[str, Any]]]
TERMINAL: Actions = [("open_program", {"program": "terminal"})]
EDITOR: Actions = [("open_program", {"program": "editor"})]


def typed(text: str) -> Actions:
    return [("type_text", {"text": text})]


def pressed(*keys: str) -> Actions:
    return [("press_keys", {"keys": list(keys)})]


COMMANDS = {
    "new_folder": "mkdir -p Reports/2026",
    "rename": "mv notes.txt ideas.txt",
    "delete": "rm old.txt",
    "copy": "cp budget.csv Archive",
    "move_logs": "mkdir Logs; mv *.log Logs",
    "swap": "mv app.log x; mv web.log app.log; mv x web.log",
    "empty": "rm Archive/*",
    "hello": "echo Hello, desktop > hello.txt",
    "append": "echo water the plants >> todo.txt",
    "correct": "sed -i s/Smith/Smyth/ letter.txt",
    "sort": "sort names.txt > sorted.txt",
    "count": "wc -l < poem.txt > count.txt",
    "total": "awk -F, '{s+=$2} END {print s}' budget.csv > total.txt",
    "find": "basename $(grep -il heron Birds/*) > found.txt",
}
SOLUTIONS: dict[str, Actions] = {
    **{name: [*TERMINAL, *typed(f"{command}\n")] for name, command in COMMANDS.items()},
    "editor": [
        *TERMINAL,
        *typed("mousepad --disable-server todo.txt &\n"),
        ("until", {"title": "HOME/todo.txt - Mousepad"}),
        *pressed("ctrl+Home"),
        *typed("ready\n"),
        *pressed("ctrl+s"),
    ],
    "terminal": TERMINAL,
    "two_programs": [*TERMINAL, *EDITOR],
    "maximize": [*TERMINAL, ("click", {"x": 500, "y": 150, "times": 2})],
    "corner": [*TERMINAL, ("drag", {"from_x": 500, "from_y": 150, "to_x": 350, "to_y": 8})],
    "manual": [
        ("open_page", {"url": "http://127.0.0.1:1/"}),
        *pressed("ctrl+l"),
        *typed("file://HOME/manual.html\n"),
    ],
}


@asynccontextmanager
async def desktop(folder: Path) -> AsyncIterator[tuple[Client, Path]]:
    """A client of a desktop with the home of the tasks, and that home."""
    async with (
        Display(folder, width=1024, height=768, home=DESKTOP / "home") as display,
        Client(desktop_server(display)) as client,
    ):
        yield client, display.home


async def state_of(client: Client) -> dict[str, Any]:
    answer = await client.call_tool("desktop_state", {})
    (content,) = answer.content
    assert isinstance(content, TextContent)
    state: dict[str, Any] = json.loads(content.text)
    return state


async def until(client: Client, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the first state that is as wanted: programs take a moment."""
    state: dict[str, Any] = {}
    try:
        async with asyncio.timeout(PATIENCE / 4):
            while unmet(state := await state_of(client), wanted):
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{unmet(state, wanted)} of {state}")
    return state


def score(task: dict[str, Any], state: dict[str, Any]) -> float:
    truth = GroundTruth(query=task["query"], answer=task["answer"])
    return desktop_scorer(json.dumps(state), truth).value


def test_every_task_has_actions() -> None:
    assert len(TASKS) == 20
    assert SOLUTIONS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", SOLUTIONS)
async def test_its_actions_solve_a_task(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    async with desktop(tmp_path) as (client, home):
        assert score(task, await state_of(client)) == 0  # before anything is done
        for tool, arguments in SOLUTIONS[name]:
            given = json.loads(json.dumps(arguments).replace("HOME", str(home)))
            if tool == "until":
                await until(client, {"windows": [given]})
                continue
            answer = await client.call_tool(tool, given)
            assert not answer.is_error, answer
        solved = await until(client, task["answer"])
    assert score(task, solved) == 1
    also = {other for other in TASKS if other != name and score(TASKS[other], solved)}
    assert also <= {"terminal", "two_programs"}  # what other solutions leave open


async def test_a_rollout_is_scored_by_the_state_of_its_desktop(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    task = TASKS["delete"]
    question = MCPTask(
        id="train/0/q1", query=task["query"], answer=task["answer"], scorer="desktop"
    )
    tools = json.loads((DESKTOP / "servers.json").read_text())
    script = [
        tool_call("open_program", program="terminal"),
        tool_call("type_text", text="rm old.txt\n"),
        tool_call("wait", seconds=3),
        "<answer>done</answer>",
        "<answer>done</answer>",
    ]
    seeing = Renderer.load(write_seeing_tokenizer(tmp_path))
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        await begin_run(store, engine, question.model_copy(update={"num_generations": 2}))
        for value in (1.0, 0.0):  # the second rollout only says that it is done
            async with open_play(
                store, engine, tools, rollout=RolloutSection(), scoring=RegisteredScoring()
            ) as context:
                record, claimed = await claim(store)
                sampler = DesktopSampler(claimed, record, context)
                result = await sampler.run()
                assert (await sampler.evaluate_record(result)).value == value
                await sampler.finish()

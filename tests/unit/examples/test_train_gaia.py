import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from mcp.types import TextContent
from support.environment_up import environments
from support.research_servers import research_programs

from agentrl.config.command_line import parse_flags
from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile
from agentrl.launcher.cluster.gpu_placement import placed
from agentrl.rewards import MCPScorerFactory
from agentrl.tools import load_mcp_servers

ROOT = Path(__file__).parents[3]
GAIA = ROOT / "examples/train_gaia"
ENTRIES = [
    {
        "task_id": "c61d22de",
        "Question": "Wie viele Brücken hat die Stadt?",
        "Level": 1,
        "Final answer": "7",
        "file_name": "",
        "Annotator Metadata": {"Steps": "1. Count."},
    },
    {
        "task_id": "17b5a6a3",
        "Question": "What is in the sheet?",
        "Level": 2,
        "Final answer": "a, b",
        "file_name": "17b5a6a3.xlsx",
    },
    {"task_id": "hidden", "Question": "Of the test split?", "Level": 3, "Final answer": "?"},
]


def convert(tmp_path: Path, lines: list[str], *flags: str) -> "subprocess.CompletedProcess[str]":
    metadata = tmp_path / "metadata.jsonl"
    metadata.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, str(GAIA / "convert.py"), str(metadata), *flags]
    return subprocess.run(
        [*command, "--out", str(tmp_path / "out.jsonl")], capture_output=True, text=True, timeout=30
    )


def test_gaias_metadata_become_questions_that_a_run_takes(tmp_path: Path) -> None:
    lines = [json.dumps(entry) for entry in ENTRIES]
    done = convert(tmp_path, lines, "--files_url", "/srv/gaia/")
    assert done.returncode == 0, done.stderr
    assert "2 questions" in done.stdout
    assert "1 of level1, 1 of level2" in done.stdout
    assert "1 without a published answer left out" in done.stdout
    with QuestionFile(
        tmp_path / "out.jsonl", DataSection(), MCPScorerFactory.check_question
    ) as questions:
        first, second = questions
    assert (first.id, first.query, first.answer) == ("c61d22de", ENTRIES[0]["Question"], "7")
    assert (first.scorer, first.answer_schema, first.tags) == (
        "gaia",
        "answer",
        ("level1", "no_file"),
    )
    assert second.query.endswith("/srv/gaia/17b5a6a3.xlsx")
    assert second.tags == ("level2", "file")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: not valid JSON"),
        ([json.dumps({"task_id": "a", "Question": "b"})], "line 1: no field 'Level'"),
        ([json.dumps(ENTRIES[1])], "17b5a6a3.xlsx; say by --files_url"),
    ],
)
def test_metadata_that_cannot_be_used_are_one_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    done = convert(tmp_path, lines)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_the_examples_settings_are_ones_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAIA_FILES", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, "x")
    config = parse_flags(["--config", str(GAIA / "config.yaml")])
    assert config.inference.inference_backend == "sglang"
    assert set(load_mcp_servers(GAIA / "servers.json")) == {"browser", "fetch", "files", "search"}


def test_train_says_that_the_tools_must_be_up(tmp_path: Path) -> None:
    done: Any = subprocess.run(
        [sys.executable, str(GAIA / "train.py")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "set MCP_SERVER_URL" in done.stderr
    ast.parse((GAIA / "agent.py").read_text())


def test_the_configuration_divides_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = parse_flags(["--config", str(GAIA / "config.yaml"), "--num_gpus", "8"])
    _, gpus = placed(config)
    assert (gpus.trainer, gpus.servers) == ((0, 1, 2, 3), ((4,), (5,), (6,), (7,)))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder with a page, and the page's address."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "page.html").write_text("<title>Lamps</title><p>The desk lamp costs 21 euro.</p>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/page.html"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_research_servers_that_the_desktops_script_installs_answer(
    tmp_path: Path, files: tuple[Path, str]
) -> None:
    folder, page = files
    installed = research_programs()
    servers = json.loads((GAIA / "servers.json").read_text())["mcpServers"]
    del servers["search"]  # is a service that wants a key
    # The page is on this machine, which this server reads from only when it is told to.
    local = {**servers["fetch"], "args": ["--ignore-robots-txt", "--allow-private-ips"]}
    programs = {"PATH": f"{installed}:{os.environ['PATH']}", "GAIA_FILES": str(folder)}

    async def said(tool: str, **arguments: str) -> str:
        answer = await client.call_tool(tool, arguments)
        return "\n".join(part.text for part in answer.content if isinstance(part, TextContent))

    with environments(tmp_path) as start:
        environment = start({**servers, "local": local}, environment=programs)
        async with environment.client() as client:
            assert "Page Title: Lamps" in await said("browser_navigate", url=page)
            assert "The desk lamp costs 21 euro." in await said("browser_snapshot")
            assert "The desk lamp costs 21 euro." in await said("local.fetch", url=page)
            assert "not a public address" in await said("fetch.fetch", url=page)
            assert "costs 21" in await said("read_text_file", path=f"{folder}/page.html")
            assert "denied" in await said("read_text_file", path="/etc/hostname")

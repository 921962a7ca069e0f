"""The documents of AWorld Train and of the original AgentRL, block by block.

Every block of code runs, with the replacements of docs/from-aworld-train.md, or a page names what to
use in its place, or says why it does not run.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from harness.processes import listening_process
from harness.scripted_engine import serve_script
from support.agent_venvs import ROOT, aworld_variables, python_with, verl_that_reads
from support.agents import assert_prompts_as_sent, open_stage
from support.doc_blocks import DOCS, run_shell
from support.environment_up import TOKEN, environments
from support.origin_documents import (
    AGENTRL_README,
    CHINESE_README,
    PAGE,
    README,
    TRAINER_PAGE,
    origin_blocks,
    outside_of_blocks,
)
from support.play import TOOL_SERVER, begin_run, tool_call

from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import MCPScorerFactory
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.tools import load_mcp_servers
from agentrl.tools.agent_environment import load_env_file

AWORLD_PAGE = (DOCS / "from-aworld-train.md").read_text()
AGENTRL_PAGE = (DOCS / "from-agentrl.md").read_text()
MODEL_DIR = ROOT / "assets/demo/model"
RUN: dict[tuple[int, int], str] = {}
"""The blocks that run, by document and number -> the test that runs them."""
Test = Callable[..., Any]


def runs(document: int, *numbers: int) -> Callable[[Test], Test]:
    """Note that a test runs these blocks."""

    def note(test: Test) -> Test:
        for number in numbers:
            assert (document, number) not in RUN
            RUN[document, number] = test.__name__
        return test

    return note


def block(document: int, number: int) -> str:
    return origin_blocks(document)[number]


def printed_on(page: str, title: str) -> set[str]:
    """Return the code in the first column of a section's table."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    return {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def page_block(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", AWORLD_PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if containing in text)
    return str(found)


def rewrite(folder: Path, *names: str) -> None:
    """Rewrite files as the page says."""
    (folder / "from_aworld.sed").write_text(page_block("sed", "from_aworld.sed"))
    command = page_block("bash", "sed -E").replace("*.py agent.yaml run.sh", " ".join(names))
    run_shell(command, folder, os.environ)


def test_every_block_runs_or_a_page_has_its_replacement_or_its_reason() -> None:
    replaced = printed_on(AWORLD_PAGE, "Commands and files")
    replaced |= printed_on(AGENTRL_PAGE, "Files, imports and commands")
    reasons = printed_on(AWORLD_PAGE, "What does not run")
    outcomes = dict.fromkeys(("run", "replaced", "refused"), 0)
    for document in range(5):
        for number, text in enumerate(origin_blocks(document)):
            lines = [line for line in text.splitlines() if line and not line.startswith("#")]
            rest = "\n".join(lines)
            for command in sorted(replaced, key=len, reverse=True):
                rest = rest.replace(command, "")
            if (document, number) in RUN:
                outcomes["run"] += 1
            elif not rest.strip():
                outcomes["replaced"] += 1
            else:
                assert lines[0] in reasons, (document, number, lines[0])
                outcomes["refused"] += 1
    assert outcomes == {"run": 25, "replaced": 16, "refused": 6}


@pytest.mark.parametrize("document", [PAGE, TRAINER_PAGE])
def test_no_code_of_the_texts_without_marks_is_left_over(document: int) -> None:
    code = r"^(?:from \S+ import|import|def|class|export|cd|git|sh|bash|pip|python3?|\w+ ?=|@)\b.*"
    assert re.findall(code, outside_of_blocks(document), re.MULTILINE) == []


def test_the_rewritten_imports_are_those_of_the_table(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(from train\.[^`]+|_target_[^`]+)` \| `([^`]+)`", AWORLD_PAGE, re.M)
    assert len(rows) == 6
    (tmp_path / "all.py").write_text("".join(f"{there}\n" for there, _ in rows))
    rewrite(tmp_path, "all.py")
    assert (tmp_path / "all.py").read_text() == "".join(f"{here}\n" for _, here in rows)
    rewrite(tmp_path, "all.py")
    assert (tmp_path / "all.py").read_text() == "".join(f"{here}\n" for _, here in rows)


def test_what_the_pages_name_here_exists() -> None:
    for page in (AWORLD_PAGE, AGENTRL_PAGE):
        rows = re.findall(r"^\| .*? \| (.*) \|$", page, re.MULTILINE)
        code = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
        paths = re.findall(r"\b(?:assets|deploy|examples|scripts)/[\w./]+", " ".join(code))
        assert len(paths) > 3
        assert [path for path in paths if not (ROOT / path).exists()] == []
        for line in code:
            if line.startswith("from agentrl"):
                exec(line, {})


@runs(README, 1)
def test_the_variables_of_a_dotenv_file_are_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text(block(README, 1))
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    load_env_file(tmp_path / ".env")
    values = {name: value for name, value in os.environ.items() if name.endswith("LLM_API_KEY")}
    assert len(values) == 8
    assert set(values.values()) == {"<YOUR_MCP_LLM_API_KEY>"}


@runs(README, 3)
def test_the_connection_that_aworlds_server_prints_is_taken() -> None:
    (server,) = load_mcp_servers(block(README, 3)).values()
    assert server.transport == "http"
    assert server.call_timeout_seconds == 6000


@runs(README, 4)
@runs(PAGE, 4, 5)
@runs(CHINESE_README, 4, 5)
def test_without_arguments_the_agents_tools_are_those_that_the_documents_print(
    tmp_path: Path,
) -> None:
    exports = block(README, 4).replace("<ip>:<port>", "localhost:8080")
    code = "from agentrl.tools import get_agent_tool_env_and_servers\n"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")}
    for document in (PAGE, CHINESE_README):
        (tmp_path / "tools.py").write_text(code + block(document, 5))
        shell = [exports.replace("<tokenid>", TOKEN), page_block("bash", "MCP_SERVERS=")]
        shell += [block(document, 4), f"{sys.executable} tools.py"]
        printed = run_shell("\n".join(shell), tmp_path, environment)
        config, names = re.findall(r"^gaia_env_\w+: (.*)$", printed, re.MULTILINE)
        shown = block(document, 5).partition("# output\n")[2].replace("# ", "")
        expected = ast.literal_eval(
            shown.partition("gaia_env_config: ")[2].partition("gaia_env_servers")[0]
        )
        made = ast.literal_eval(config)
        headers = made["mcpServers"]["aworld-mcp"]["headers"]
        assert headers.pop("Authorization") == f"Bearer {TOKEN}"
        assert made == expected
        assert names == "['aworld-mcp']"


@runs(AGENTRL_README, 4)
def test_the_original_agentrls_questions_are_taken(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(block(AGENTRL_README, 4))
    with QuestionFile(
        tmp_path / "questions.jsonl", DataSection(), MCPScorerFactory.check_question
    ) as questions:
        assert [(row.id, row.scorer, row.answer_schema) for row in questions] == [
            ("task_001", "agentcpm", "answer"),
            ("task_002", "math", "boxed"),
        ]


@runs(AGENTRL_README, 5)
def test_the_original_agentrls_command_starts_a_run(tmp_path: Path) -> None:
    lines = [line for line in block(AGENTRL_README, 5).splitlines() if line[:1] != "#"]
    name, argument = lines[0].split()
    script = (ROOT / name).read_text().replace("scripts/setup\n", "")
    script = script.replace(".venv/bin/agentrl", f"{sys.executable} -m agentrl")
    done = subprocess.run(
        ["bash", "-c", script, ROOT / name, argument, "--dry_run", "--output_dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "my_rl_training_run" in done.stdout
    assert "MINIRL" in done.stdout


ROWS = [{"query": "lamp: price?", "answer": "7"}, {"query": "rug: price?", "answer": "12"}]


@pytest.fixture(scope="module")
def aworld_python() -> Path:
    return python_with("aworld")


def run_in(folder: Path, python: Path, script: str, **variables: str) -> str:
    done = subprocess.run(
        [python, script],
        cwd=folder,
        env={**aworld_variables(folder), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def loop_of_the_page() -> str:
    """Return the agent loop of the text that lost its indentation, which the other README has."""
    loop, url = block(README, 5), "llm_model_name=self.get_llm_server_model_name(),\n"
    loop = loop.replace(url, f'{url}                llm_api_key="dummy",\n')
    loop = loop.replace("YOUR SYSTEM PROMPT", "<your_system_prompt>")

    def code(text: str) -> list[str]:
        lines = [line.strip() for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]

    assert code(loop) == code(block(PAGE, 7))
    return loop


def describing(agent: str) -> str:
    return (
        "from agentrl import AgentTrainer\n"
        "if __name__ == '__main__':\n"
        f"    AgentTrainer({agent}, train_dataset={ROWS!r}, run_path='run')\n"
    )


def write_agent_of(document: int, folder: Path, url: str) -> None:
    """Write the agent of a document, and what describes it for a run."""
    if document == CHINESE_README:
        text = re.sub(r"https://playground\S+(?=\")", url, block(CHINESE_README, 6))
        (folder / "gaia_agent.py").write_text(text)
        (folder / "describe.py").write_text(f"from gaia_agent import agent\n{describing('agent')}")
        return
    loop = block(README, 5) if document == README else loop_of_the_page()
    entry = block(*((README, 6) if document == README else (PAGE, 8)))
    (folder / "custom_agent_loop.py").write_text(loop)
    (folder / "agent.yaml").write_text(entry.replace("\n_target_", "\n  _target_"))
    rewrite(folder, "custom_agent_loop.py", "agent.yaml")
    (folder / "describe.py").write_text(describing("'agent.yaml'"))


@pytest.fixture
async def empty_store(mongo_uri: str) -> AsyncIterator[TrajectoryStore]:
    async with TrajectoryStore.connect(mongo_uri) as store:
        await store.ensure_schema()
        yield store
        await store.drop_database()


def price_of_the_lamp(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "<answer>7</answer>"
    (name,) = set(re.findall(r'"name": "([\w.]*look)"', prompt))
    return tool_call(name, key="lamp")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@runs(README, 5, 6)
@runs(PAGE, 7, 8)
@runs(CHINESE_README, 6)
@pytest.mark.parametrize("document", [README, PAGE, CHINESE_README])
async def test_the_agents_of_the_documents_use_their_tools_and_every_token_is_recorded(
    document: int,
    aworld_python: Path,
    empty_store: TrajectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = MCPTask(id="train/0/q", query=ROWS[0]["query"], answer="7")
    log_file = tmp_path / "tools.log"
    prices = {"command": sys.executable, "args": [str(TOOL_SERVER), str(log_file)]}
    with environments(tmp_path) as start:
        tools = start({"prices": {**prices, "writable": [str(tmp_path)]}})
        names = {"MCP_SERVER_URL": tools.url, "MCP_SERVER_TOKEN": tools.token}
        for name, value in {**names, "INVITATION_CODE": tools.token}.items():
            monkeypatch.setenv(name, value)
        for name, value in aworld_variables(tmp_path).items():
            monkeypatch.setenv(name, value)
        write_agent_of(document, tmp_path, tools.url)
        run_in(tmp_path, aworld_python, "describe.py")
        workers = AgentWorkerPool.load(tmp_path / "run/agent_workers.json")
        with serve_script(Renderer.load(MODEL_DIR), price_of_the_lamp) as engine:
            await begin_run(empty_store, engine, task)
            async with open_stage(empty_store, engine) as stage:
                result, turns = await stage.play(workers.run)
        workers.close()
    assert result.final_answer == "7"
    assert "look" in log_file.read_text()
    assert_prompts_as_sent(turns, [request["input_ids"] for request in engine.requests])
    assert [call.name for turn in turns for call in turn.tool_calls] != []
    assert all(turn.trainable for turn in turns)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@runs(TRAINER_PAGE, 0, 2, 3, 4, 5, 6, 7)
def test_engines_of_ones_own_are_registered_and_train(aworld_python: Path, tmp_path: Path) -> None:
    package = tmp_path / "my_framework"
    package.mkdir()
    (package / "my_trainer.py").write_text(block(TRAINER_PAGE, 4))
    (package / "__init__.py").write_text(block(TRAINER_PAGE, 5))
    imported = "from agentrl import AgentTrainer\nfrom my_framework import MyFrameworkTrainer as CustomTrainer\n"
    registered = "assert ('custom' in AgentTrainer.engine_names()) is {}\n"
    (tmp_path / "names.py").write_text(
        imported
        + block(TRAINER_PAGE, 2)
        + registered.format(True)
        + block(TRAINER_PAGE, 3)
        + registered.format(False)
    )
    (tmp_path / "option_a.py").write_text(
        f"my_agent = 'agent.yaml'\n{block(TRAINER_PAGE, 6)}trainer.train()\n"
        "print(trainer.train_processor.framework_config)\n"
    )
    (tmp_path / "option_b.py").write_text(
        f"{block(TRAINER_PAGE, 7)}AgentTrainer('agent.yaml', train_engine_name='my_framework').train()\n"
    )
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/agent_config.yaml").write_text("name: clerk\nsystem_prompt: Be brief.\n")
    for split in ("train", "test"):
        rows = "".join(f"{split} {row['query']},{row['answer']}\n" for row in ROWS)
        (tmp_path / f"path/to/{split}_dataset.csv").write_text(f"query,answer\n{rows}")
    (tmp_path / "verl_engine.py").write_text(
        "from agentrl import AgentTrainer\n"
        "def my_reward_function(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth in solution_str)\n"
        f"training_config = {{'actor_rollout_ref.model.path': {str(MODEL_DIR)!r}}}\n"
        f"if __name__ == '__main__':\n{indent(block(TRAINER_PAGE, 0), '    ')}"
    )
    scripts = ["names.py", "option_a.py", "option_b.py", "verl_engine.py"]
    rewrite(tmp_path, "my_framework/my_trainer.py", *scripts)
    printed = [run_in(tmp_path, aworld_python, script) for script in scripts]
    assert "'epochs': 10" in printed[1]
    final = yaml.safe_load((tmp_path / "outputs/final_trainer.yaml").read_text())
    assert final["data"]["val_files"].endswith("test_data.parquet")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@runs(CHINESE_README, 7)
def test_the_trainer_of_the_documents_takes_a_training_step(
    aworld_python: Path, tmp_path: Path
) -> None:
    text = block(CHINESE_README, 7)
    questions = str(ROOT / "assets/demo/train.jsonl")
    filled = {
        '"None or string or code reference"\n# 定义agent': f"{questions!r}, None\n",
        "agent = ...": "agent = 'agent.yaml'",
        '"string or json"': "'train.yaml'",
        '"None or string or code reference"': "'reward.py:gaia_reward_func'",
    }
    for placeholder, value in filled.items():
        assert placeholder in text
        text = text.replace(placeholder, value, 1)
    (tmp_path / "main.py").write_text(f"if __name__ == '__main__':\n{indent(text, '    ')}")
    (tmp_path / "reward.py").write_text("from agentrl.rewards import gaia_reward_func\n")
    settings = {
        "run_name": "documents",
        "model_name_or_path": str(MODEL_DIR),
        "max_steps": 1,
        "groups_per_step": 4,
        "num_generations": 6,
        "num_samplers": 1,
        "agent_processes": 3,
        "max_new_tokens": 48,
        "mongo_port": 0,
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
    shop: list[str | Path] = [sys.executable, ROOT / "examples/shop/server.py", "--port", "{port}"]
    with listening_process(shop) as url, environments(tmp_path) as start:
        tools = start({"shop": {"url": f"{url}/mcp"}})
        write_agent_of(README, tmp_path, tools.url)
        rewrite(tmp_path, "main.py")
        names = {"MCP_SERVER_URL": tools.url, "MCP_SERVER_TOKEN": tools.token}
        run_in(tmp_path, aworld_python, "main.py", **names)
    summary = json.loads((tmp_path / "runs/output/summary.json").read_text())
    assert summary["status"] == "completed"
    assert len(summary["reward_mean"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@runs(README, 7)
@runs(PAGE, 12, 13)
def test_the_script_of_the_documents_gives_verl_its_settings(
    aworld_python: Path, tmp_path: Path
) -> None:
    script = re.sub(r"\\\n", r"\\\n    ", block(PAGE, 12))  # the text lost the indentation
    (tmp_path / "run.sh").write_text(script)
    (tmp_path / "train.py").write_text(page_block("python", "# train.py"))
    (tmp_path / "gaia_reward_function.py").write_text(
        "from agentrl.rewards import gaia_reward_func\n"
    )
    write_agent_of(README, tmp_path, "")
    rewrite(tmp_path, "run.sh")
    (tmp_path / "datasets").mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": row["query"]}],
            "data_source": "gaia",
            "agent_name": "gaia_agent",
            "reward_model": {"style": "GAIA", "ground_truth": row["answer"]},
            "extra_info": {"split": "train"},
        }
        for row in ROWS
    ]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"datasets/{split}.parquet")
    environment = aworld_variables(tmp_path) | {
        "PATH": f"{aworld_python.parent}:{os.environ['PATH']}",
        "AGENTRL_VERL_PYTHON": str(verl_that_reads(tmp_path)),
        "model_path": str(MODEL_DIR),
    }
    assert block(README, 7) == block(PAGE, 13)
    printed = run_shell(block(PAGE, 13), tmp_path, environment, seconds=400)
    found = next(json.loads(line) for line in printed.splitlines() if line[:1] == "{")
    assert (found["loop"], found["adv_estimator"]) == ("VerlAgentLoop", "grpo")
    assert (found["right"], found["wrong"]) == (1.0, 0.0)
    final = yaml.safe_load((tmp_path / "runs/final_trainer.yaml").read_text())
    assert final["actor_rollout_ref"]["actor"]["clip_ratio_high"] == 0.28
    assert final["trainer"]["test_freq"] == 5
    assert final["trainer"]["default_local_dir"] == str(tmp_path / "checkpoint/qwe3")

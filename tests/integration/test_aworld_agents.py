"""AWorld's own agents, from PyPI, in an environment of their own without torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.scripted_engine import serve_script
from support.agent_venvs import ROOT, aworld_variables, python_with, verl_that_reads
from support.agents import assert_prompts_as_sent, open_stage
from support.demo_run import logs
from support.environment_up import environments
from support.function_agents import CATALOGUE
from support.nasty_agent import KEY, PROMPT, TOKEN
from support.play import begin_run, tool_call
from support.research_servers import research_programs

from agentrl.data import TokenTree
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.renderers.renderer import Renderer
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

MODEL_DIR = ROOT / "assets/demo/model"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def aworld_python() -> Path:
    return python_with("aworld")


@pytest.fixture(scope="module")
def checked(aworld_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checked")
    # Secrets that no variable of the user's holds; see the environment that the engines make.
    secrets = {
        "AGENTRL_THE_GR_E_AGENT_HEADERS_AUTHORIZATION": TOKEN,
        "AGENTRL_THE_GR_E_AGENT_ENV_MAPS_API_KEY": KEY,
    }
    done = subprocess.run(
        [aworld_python, ROOT / "tests/support/aworld_check.py", folder, MODEL_DIR],
        env=aworld_variables(folder) | secrets,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "folder": folder}


def test_an_agent_and_its_yaml_file_build_the_same_agent(checked: dict[str, Any]) -> None:
    assert checked["object"] == checked["yaml"]
    assert checked["object"] == {
        "class": "LLMAgent",
        "prompt": PROMPT,
        "headers": {"Authorization": f"Bearer {TOKEN}", "MCP_SERVERS": "a,b"},
        "servers": ["shop"],
        "llm": ["http://127.0.0.1:1/v1", "policy"],
        "temperature": 0.5,
    }


def test_nothing_that_was_written_holds_the_agents_secrets(checked: dict[str, Any]) -> None:
    written = [p for n in ("object", "yaml") for p in (checked["folder"] / n).rglob("*.*")]
    assert len(written) > 8
    for path in written:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert KEY.encode() not in content, path


def test_in_a_swarm_those_without_an_address_of_their_own_are_trained(
    checked: dict[str, Any],
) -> None:
    team = checked["team"]
    assert {member["name"]: member["trained"] for member in team["members"]} == {
        "lead": True,
        "expert": False,
    }
    assert "k1" in checked["secrets"].values()
    assert "remove it from the agents to train" in checked["refused"]


def test_swarms_and_parallel_agents_inside_of_a_swarm_are_built_as_they_were(
    checked: dict[str, Any],
) -> None:
    assert checked["nested"] == [
        "lead",
        {"parallel": ["right", ["inside", "left", "expert"]]},
        "last",
    ]


async def test_a_nested_swarm_plays_a_task_and_its_calls_are_recorded_token_for_token(
    checked: dict[str, Any], mongo_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aworld_variables(checked["folder"]).items():
        monkeypatch.setenv(name, value)
    spoken = []

    def script(prompt: str) -> str:
        (name,) = re.findall(r"You are (\w+)\.", prompt)
        spoken.append(name)
        return f"{name} says {len(spoken)}"

    workers = AgentWorkerPool.load(checked["folder"] / "swarm/agent_workers.json")
    task = MCPTask(id="train/0/q", query="How many?", answer="7")
    async with TrajectoryStore.connect(mongo_uri) as empty:
        await empty.ensure_schema()
        with serve_script(Renderer.load(MODEL_DIR), script) as engine:
            await begin_run(empty, engine, task)
            async with open_stage(empty, engine) as stage:
                result, turns = await stage.play(workers.run)
            replies = [engine.reply_ids(f"{name} says {n}") for n, name in enumerate(spoken, 1)]
        record = await empty.records.get(turns[0].record_id)
        await empty.drop_database()
    workers.close()
    assert sorted(spoken) == ["last", "lead", "left", "right", "second"]
    assert (spoken[0], spoken[-1]) == ("lead", "last")
    assert spoken.index("left") < spoken.index("second")
    assert result.outcome == "answered"
    assert result.final_answer == "last says 5"
    assert record is not None
    assert record.turns == tuple(turn.id for turn in turns)
    read = engine.renderer.decode(engine.requests[-1]["input_ids"])
    assert f"right: right says {spoken.index('right') + 1}" in read
    assert f"inside: second says {spoken.index('second') + 1}" in read
    assert_prompts_as_sent(turns, [request["input_ids"] for request in engine.requests])
    assert sorted(turn.output_ids.tolist() for turn in turns) == sorted(replies)
    assert all(turn.trainable for turn in turns)


async def test_the_gaia_examples_agent_uses_the_examples_tools(
    aworld_python: Path, mongo_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = research_programs()
    (tmp_path / "lamps.txt").write_text("The desk lamp costs 21 euro.")
    question = f"What does the desk lamp of {tmp_path}/lamps.txt cost?"
    described = f"""
from agentrl import AgentTrainer
from agentrl.rewards import gaia_reward_func
AgentTrainer("examples/train_gaia/agent.py:GaiaAgentLoop", reward_func=gaia_reward_func,
    train_dataset=[{{"query": {question!r}, "answer": "21"}}], run_path={str(tmp_path / "run")!r})
"""

    def script(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return f"<answer>{'21' if 'lamp costs 21' in prompt else 'unread'}</answer>"
        (name,) = set(re.findall(r'"name": "([^"]*read_text_file)"', prompt))
        assert '"fetch' in prompt
        assert "browser_navigate" in prompt
        return tool_call(name, path=f"{tmp_path}/lamps.txt")

    servers = json.loads((ROOT / "examples/train_gaia/servers.json").read_text())["mcpServers"]
    del servers["search"]  # is a service that wants a key
    found = {"PATH": f"{programs}:{os.environ['PATH']}", "GAIA_FILES": str(tmp_path)}
    with environments(tmp_path) as start:
        tools = start(servers, environment=found)
        variables = {"MCP_SERVER_URL": tools.url, "MCP_SERVER_TOKEN": tools.token}
        for name, value in {**aworld_variables(tmp_path), **variables}.items():
            monkeypatch.setenv(name, value)
        command = [str(aworld_python), "-c", described]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
        workers = AgentWorkerPool.load(tmp_path / "run/agent_workers.json")
        async with TrajectoryStore.connect(mongo_uri) as empty:
            await empty.ensure_schema()
            with serve_script(Renderer.load(MODEL_DIR), script) as engine:
                await begin_run(empty, engine, MCPTask(id="train/0/q", query=question, answer="21"))
                async with open_stage(empty, engine) as stage:
                    result, turns = await stage.play(workers.run)
            await empty.drop_database()
        scored = {"data_source": "gaia", "ground_truth": "21", "extra_info": None}
        rewards = [
            await workers.reward({**scored, "solution_str": f"<answer>{answer}</answer>"})
            for answer in (result.final_answer, "12")
        ]
        workers.close()
    assert rewards == [1.0, 0.0]
    assert_prompts_as_sent(turns, [request["input_ids"] for request in engine.requests])


def test_the_gaia_example_trains_a_step_in_an_environment_that_is_up(
    aworld_python: Path, tmp_path: Path
) -> None:
    example = shutil.copytree(ROOT / "examples/train_gaia", tmp_path / "examples/train_gaia")
    # The demo's tiny model was taught the shop's tools, and no instructions.
    (example / "system_prompt.txt").write_text("")
    tasks = [
        {"query": f"{item}: what do 4 packs cost?", "answer": str(4 * fields["price"])}
        for item, fields in list(CATALOGUE.items())[:3]
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps(task) for task in tasks))
    sizes = {"groups_per_step": 3, "agent_processes": 2, "max_prompt_tokens": 1200, "max_steps": 1}
    config = yaml.safe_load((ROOT / "examples/aworld_agent.yaml").read_text())
    settings = config | sizes | {"mongo_port": 0, "model_name_or_path": str(MODEL_DIR)}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    shop = {"command": sys.executable, "args": [str(ROOT / "examples/shop/server.py"), "--stdio"]}
    words = ["--train_dataset", data, "--test_dataset", data, "--config", tmp_path / "small.yaml"]
    with environments(tmp_path) as start:
        tools = start({"shop": shop})
        done = subprocess.run(
            [aworld_python, "examples/train_gaia/train.py", *map(str, words)],
            cwd=tmp_path,
            env=aworld_variables(tmp_path)
            | {"MCP_SERVER_URL": tools.url, "MCP_SERVER_TOKEN": tools.token},
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )
    folder = tmp_path / "output/gaia"
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs(folder)
    (line,) = (folder / "output/metrics.jsonl").read_text().splitlines()
    step = json.loads(line)
    assert 0.0 < step["reward_mean"] < 1.0
    assert step["grad_norm"] > 0


def test_agents_run_where_there_is_no_torch(aworld_python: Path) -> None:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
    assert subprocess.run([aworld_python, "-c", look], check=False, timeout=60).returncode == 0


def test_the_example_with_verl_writes_what_verl_reads(aworld_python: Path, tmp_path: Path) -> None:
    verl = verl_that_reads(tmp_path)
    config = {"actor_rollout_ref.model.path": "assets/demo/model", "trainer.n_gpus_per_node": 1}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(config))
    words: list[str | Path] = [
        "--engine",
        "verl",
        "--config",
        tmp_path / "verl.yaml",
        "--run_path",
        tmp_path / "run",
    ]
    done = subprocess.run(
        [aworld_python, "examples/aworld_agent.py", *words, "--prompt", PROMPT],
        cwd=ROOT,
        env=aworld_variables(tmp_path)
        | {"MCP_SERVER_TOKEN": TOKEN, "AGENTRL_VERL_PYTHON": str(verl)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = next(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    assert found["loop"] == "VerlAgentLoop"
    assert found["adv_estimator"] == "grpo"
    assert found["agent"]["arguments"]["system_prompt"] == PROMPT
    assert found["right"] == 1.0
    assert found["wrong"] == 0.0
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) >= 6
    for path in written:
        assert TOKEN.encode() not in path.read_bytes(), path


def run_example(python: Path, folder: Path, *words: str, **changes: Any) -> None:
    config = yaml.safe_load((ROOT / "examples/aworld_agent.yaml").read_text())
    (folder / "example.yaml").write_text(yaml.safe_dump({**config, "mongo_port": 0, **changes}))
    paths = ["--run_path", str(folder), "--config", str(folder / "example.yaml")]
    done = subprocess.run(
        [python, "examples/aworld_agent.py", *paths, *words],
        cwd=ROOT,
        env=aworld_variables(folder),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs(folder)


@pytest.fixture(scope="module", params=["agent", "swarm"])
def trained(
    request: pytest.FixtureRequest, aworld_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of one step, small enough for two cores: eight rollouts at a time, two worker processes."""
    folder = tmp_path_factory.mktemp(request.param)
    words = ["--swarm"] if request.param == "swarm" else []
    sizes = {"max_steps": 1, "agent_processes": 2, "groups_per_step": 2, "num_generations": 4}
    run_example(aworld_python, folder, *words, **sizes, learning_rate=0.0005, warmup_steps=0)
    return folder


@pytest.fixture
async def store(trained: Path) -> AsyncIterator[TrajectoryStore]:
    with EmbeddedMongo(trained / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("aworld")) as store:
            yield store


async def test_the_example_trains_the_agent_and_of_a_swarm_the_one_without_an_address(
    trained: Path, store: TrajectoryStore
) -> None:
    summary = json.loads((trained / "output/summary.json").read_text())
    assert summary["status"] == "completed"
    assert 0.0 < summary["reward_mean"][0] < 1.0
    num_records = num_calls = 0
    async for data in store.ledger.find(status="trained", hydrate=True):
        num_records += 1
        # Of a swarm, those with an address of their own call their models directly.
        assert all(turn.trainable for turn in data.turns)
        num_calls += sum(len(turn.tool_calls) for turn in data.turns)
        tree = TokenTree.from_turns(data.turns)
        assert tree.num_targets == sum(len(turn.output_ids) for turn in data.turns)
    assert num_records > 0
    assert num_calls >= num_records
    # No conversation is kept where every process reads and writes all of them.
    assert not (trained / "aworld_memory").exists()
    assert "mismatch" not in (trained / "logs/aworld_sampler_0.log").read_text()

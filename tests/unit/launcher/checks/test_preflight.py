"""What a person should know before a run starts that is no mistake."""

import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from agentrl.config.loading import load_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.launcher.checks import preflight
from agentrl.launcher.checks.preflight import (
    _check_groups_and_ranks,
    _check_store,
    _check_tools,
    check_inputs,
    input_findings,
)
from agentrl.launcher.checks.question_checks import check_questions
from agentrl.rollout.worker.branching import check_tools_can_branch
from agentrl.rollout.worker.resources import tools_config
from agentrl.runtime.ports import free_port
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod


async def test_questions_that_end_early_and_keys_that_nothing_reads_are_noted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"id": f"{n}", "query": "Q", "anwser": n} for n in range(10)]
    path.write_text("\n".join(json.dumps(line | {"scorer": "told"}) for line in lines))
    scorers = tmp_path / "scorers.py"
    scorers.write_text(
        "from agentrl.rewards import MCPScorerFactory\n"
        "MCPScorerFactory.register_scorer('told')(lambda answer, truth: 1.0)\n"
    )
    given = {"train_file": str(path), "scorer_module": str(scorers), "groups_per_step": 4}
    assert await check_inputs(load_config(given)) == [
        f"own columns of {path}: anwser (did you mean answer?) (`truth.columns` in scorers, "
        "`task.columns` in agents, `${row.NAME}` in tool servers)"
    ]
    notes = await check_inputs(load_config(given | {"max_steps": 9}))
    assert notes[1] == (
        "--max_steps 9: 10 question(s) last for at most 3 step(s) of 4; repeat them with "
        "--num_train_epochs 4"
    )
    assert len(await check_inputs(load_config(given | {"max_steps": 3}))) == 1


async def test_a_database_that_asks_for_no_password_is_noted(
    tmp_path: Path, mongod: EmbeddedMongo
) -> None:
    (tmp_path / "open").mkdir()
    port = free_port()
    command = [
        str(find_mongod()),
        "--dbpath",
        str(tmp_path / "open"),
        "--port",
        str(port),
        "--replSet",
        "rs",
    ]
    with subprocess.Popen([*command, "--bind_ip", "127.0.0.1"], stdout=subprocess.DEVNULL) as open_:
        try:
            address = f"127.0.0.1:{port}"
            with MongoClient[dict[str, Any]](address, directConnection=True) as client:
                members = [{"_id": 0, "host": address}]
                client.admin.command("replSetInitiate", {"_id": "rs", "members": members})
            uri = f"mongodb://{address}/?replicaSet=rs"
            config = load_config(
                {"db_connection_string": uri, "train_file": "assets/demo/train.jsonl"}
            )
            (note,) = await _check_store(config, trains=True)
            assert note.startswith("--db_connection_string asks for no password: programs of tools")
        finally:
            open_.kill()
    closed = mongod.uri("x")
    given = {"train_file": "assets/demo/train.jsonl", "db_connection_string": closed}
    assert await _check_store(load_config(given), trains=True) == []
    scheme, _, rest = closed.partition("://")
    without = f"{scheme}://{rest.rpartition('@')[2].replace('&authSource=admin', '')}"
    with pytest.raises(StoreError, match="requires a login"):
        await _check_store(load_config({**given, "db_connection_string": without}), trains=True)


async def test_tools_beside_an_agent_are_noted(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    (tmp_path / "own.py").write_text("async def play(task, endpoint):\n    return ''\n")
    command = "python examples/shop/server.py --port {port}"
    given = {
        "train_file": str(tmp_path / "q.jsonl"),
        "agent": f"{tmp_path}/own.py:play",
        "tool_server_command": command,
    }
    unused, bounds = await check_inputs(load_config(given))
    assert unused.startswith("the agent uses its own tools")
    assert bounds.startswith("programs of tools")


SERVERS = {
    "notes": {"url": "http://127.0.0.1:1/mcp", "per_rollout": True},
    "web": {"url": "http://127.0.0.1:1/mcp", "resumable": True},
    "shop": {"url": "http://127.0.0.1:1/mcp"},
}


async def test_a_tool_server_whose_state_no_branch_could_restore_is_refused_by_name() -> None:
    def config(servers: dict[str, Any], **flags: str) -> RootConfig:
        given = json.dumps({"mcpServers": servers})
        return load_config({"rollouts": "tree", "mcp_servers": given, **flags})

    with pytest.raises(ConfigError, match="--rollouts tree: tool server 'shop' declares neither"):
        await _check_tools(config(SERVERS), None)
    allowed = {name: SERVERS[name] for name in ("notes", "web")}
    for passing in (
        config(allowed),
        config(SERVERS, resumable_tools="true"),
        config(SERVERS, rollouts="chains"),
    ):
        check_tools_can_branch(passing, tools_config(passing.tools))


GROUP_SCORER = """
from agentrl.rewards import MCPScorerFactory
from agentrl.rollout import AsyncSampler, register_sampler
from agentrl.schema import MCPTask, Task
from agentrl.schema.task import register_task_type


@MCPScorerFactory.register_scorer("ranked", sees_group=True)
def ranked(records, truth):
    return [0.0 for _ in records]


@register_task_type
class WanderTask(Task):
    kind = "wander"


@register_sampler(WanderTask)
class Wander(AsyncSampler):
    async def run(self): ...
    async def evaluate_record(self, result): ...


def train_tasks(seed):
    yield WanderTask(id="train/0/1")
"""


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            "openenv:http://127.0.0.1:9",
            "--rollouts tree: environment openenv:http://127.0.0.1:9 offers no snapshots and",
        ),
        ("textarena:Walk-v0?replayable=false", "add replayable=true to its parameters"),
        ("openenv:http://127.0.0.1:9?replayable=7", "replayable is true or false"),
        # A declaration is enough; the environment itself is not there.
        ("openenv:http://127.0.0.1:9?replayable=true", "--env openenv:http://127.0.0.1:9: "),
    ],
)
async def test_an_environment_that_cannot_branch_is_refused_by_name_before_it_starts(
    environment: str, problem: str
) -> None:
    config = load_config({"env": environment, "rollouts": "tree", "env_python": sys.executable})
    with pytest.raises(ConfigError, match=re.escape(problem)):
        await check_questions(config, trains=True)


async def test_scorers_and_samplers_that_trees_cannot_have_are_refused_by_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "ranked"}')
    (tmp_path / "own.py").write_text(GROUP_SCORER)
    questions = {"train_file": f"{tmp_path}/q.jsonl", "scorer_module": f"{tmp_path}/own.py"}
    with pytest.raises(ConfigError, match="scorer 'ranked' scores all rollouts of a question"):
        await check_questions(load_config({"rollouts": "tree", **questions}), trains=True)
    await check_questions(load_config(questions), trains=True)
    samplers = {"rollouts": "tree", "sampler_module": f"{tmp_path}/own.py"}
    with pytest.raises(ConfigError, match="Wander cannot start at a turn of another rollout"):
        await check_questions(load_config(samplers), trains=True)
    await check_questions(load_config(samplers | {"resumable_tools": "true"}), trains=True)


async def test_held_out_questions_that_are_trained_on_are_noted(tmp_path: Path) -> None:
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    files = {"train_file": f"{tmp_path}/train.jsonl", "eval_file": f"{tmp_path}/held_out.jsonl"}
    (note,) = await check_inputs(load_config(files))
    assert note.startswith("--eval_file holds the training questions")


async def test_a_question_beyond_the_longest_prompt_and_scorers_without_a_name_are_noted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"query": query, "answer": 1, "scorer": "exact"} for query in ("Q", "word " * 500)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "scorers.py").write_text("def mine(answer, truth):\n    return 1.0\n")
    flags = {"scorer_module": str(tmp_path / "scorers.py"), "max_prompt_tokens": 400}
    unnamed, long = await check_inputs(load_config({"train_file": str(path), **flags}))
    assert unnamed.startswith(
        f"--scorer_module {tmp_path}/scorers.py registers no scorer; decorate its function with "
        "@MCP"
    )
    assert long.startswith(f"{path}: a question has ")
    assert long.endswith(": its rollouts end without an answer")


async def test_a_run_that_starts_no_sampler_says_how_one_joins(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    given = {"train_file": str(tmp_path / "q.jsonl"), "num_samplers": 0, "output_dir": tmp_path}
    (note,) = await check_inputs(load_config(given))
    assert note == (
        "--num_samplers 0: sampling starts when a sampler joins: agentrl sample --config "
        f"{tmp_path}/config.yaml"
    )


async def test_a_metrics_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        # The first sampler's.
        given = {"train_file": str(tmp_path / "q.jsonl"), "metrics_port": port - 1}
        with pytest.raises(ConfigError, match=f"^--metrics_port {port - 1}: port {port} is in use"):
            await check_inputs(load_config(given))


async def test_an_interruption_during_a_check_ends_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subjects: list[str] = []
    note = subjects.append

    async def check() -> None:
        async for found in input_findings(load_config({})):
            note(found.subject)

    checking = asyncio.create_task(check())

    def interrupt(*_: object, **__: object) -> None:
        checking.cancel()

    monkeypatch.setattr(preflight, "check_folders", interrupt)
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert subjects == ["packages", "folders"]


def test_a_pass_that_is_shorter_than_a_reply_is_noted() -> None:
    flags = {"max_tokens": "128", "max_new_tokens": "512", "num_samplers": "1"}
    (note,) = _check_groups_and_ranks(load_config(flags), trains=True)
    assert note.startswith("--max_tokens 128 is the size of a pass of training")
    assert _check_groups_and_ranks(load_config({**flags, "max_tokens": "2048"}), trains=True) == []


SERVER = """
import json, sys, time

while time.process_time() < float(sys.argv[1]):
    pass
known = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "burning", "version": "1"},
    },
    "tools/list": {"tools": [{"name": sys.argv[2], "inputSchema": {"type": "object"}}]},
}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": known.get(asked["method"], {})}
        print(json.dumps(answer), flush=True)
"""


async def test_the_cost_of_a_start_is_that_of_the_servers_that_rollouts_start(
    tmp_path: Path,
) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    def server(seconds: float, name: str, **settings: Any) -> dict[str, Any]:
        return {"command": sys.executable, "args": [str(program), str(seconds), name], **settings}

    servers = {"own": server(0.6, "note", per_rollout=True), "shared": server(3.0, "search")}

    def config(**flags: str) -> RootConfig:
        given = json.dumps({"mcpServers": servers})
        return load_config({"mcp_servers": given, "groups_per_step": "2", **flags})

    (note,) = await _check_tools(config(num_generations="4", mcp_tool_names="search,note"), None)
    found = re.fullmatch(
        r"each rollout starts its own own \((.*) s of processor time\): (\d+) s a step of 8 .*",
        note,
    )
    assert found is not None, note
    assert 0.6 <= float(found[1]) < 2.0
    assert int(found[2]) == pytest.approx(8 * float(found[1]), abs=1)
    del servers["own"]["per_rollout"]
    assert await _check_tools(config(), None) == []


async def test_a_column_or_fixture_that_a_server_needs_is_missed_before_the_start(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [
        {"id": "a", "query": "Q", "answer": 1, "db": "a.db"},
        {"id": "b", "query": "Q", "answer": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    server = {"command": "x", "per_rollout": True, "fixture": "${row.db}"}
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"tracker": server}))
    given = {"train_file": str(path), "mcp_servers": str(servers), "groups_per_step": 2}
    with pytest.raises(
        ConfigError, match="tracker needs the column 'db', which not every question"
    ):
        await check_inputs(load_config(given))
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(ConfigError, match=r"fixture 'a.db' of question 'a' does not exist in"):
        await check_inputs(load_config(given))
    path.write_text(json.dumps(lines[0] | {"db": "../a.db"}))
    with pytest.raises(ConfigError, match=r"fixture '../a.db' of question 'a' is not below"):
        await check_inputs(load_config(given))

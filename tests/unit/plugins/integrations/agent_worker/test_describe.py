"""What is written down of an agent."""

import json
import os
from pathlib import Path

import pytest
from support.nasty_agent import KEY, PROMPT, TOKEN, write_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AworldAgentLoop
from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import (
    AWorldAgent,
    FunctionAgent,
    parse_description,
)
from agentrl.plugins.integrations.agent_worker.secret_values import SecretValues, resolved


async def plain_agent(task: object, endpoint: object) -> str:
    return "answer"


def needs_more(task: object, tools: object, style: object) -> str:
    return ""


def swapped(endpoint: object, task: object) -> str:
    return ""


def old_form(task: object, llm_base_url: str) -> str:
    return ""


class Loop(AworldAgentLoop):
    async def build_agents(self) -> object:
        return object()


class Unfinished(AworldAgentLoop):
    pass


class Underived:
    async def build_agents(self) -> object:
        return object()


def test_a_description_survives_as_json_and_holds_no_secret(tmp_path: Path) -> None:
    description, secrets = describe(write_agent(tmp_path))
    assert isinstance(description, AWorldAgent)
    text = json.dumps(description.model_dump(mode="json"), ensure_ascii=False)
    assert parse_description(json.loads(text)) == description
    assert TOKEN not in text
    assert KEY not in text
    assert description.arguments["system_prompt"] == PROMPT
    assert description.llm == {"llm_temperature": 0.5}
    assert sorted(secrets.values()) == sorted([TOKEN, KEY])


def test_secrets_come_back_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, secrets = describe(write_agent(tmp_path))
    assert isinstance(description, AWorldAgent)
    config = description.arguments["mcp_config"]
    with pytest.raises(ConfigError, match=r"environment variable AGENTRL_\w+ is not set"):
        resolved(config)
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    server = resolved(config)["mcpServers"]["shop"]
    assert server["headers"] == {"Authorization": f"Bearer {TOKEN}", "MCP_SERVERS": "a,b"}
    assert server["env"] == {"MAPS_API_KEY": KEY}


def test_a_variable_that_holds_the_secret_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SERVER_TOKEN", TOKEN)
    secrets = SecretValues("AGENTRL_X")
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Api-Key": "${OTHER_KEY}"}
    assert secrets.replaced({"headers": headers}) == {
        "headers": {"Authorization": "Bearer ${MCP_SERVER_TOKEN}", "X-Api-Key": "${OTHER_KEY}"}
    }
    assert secrets.environment == {}


def test_addresses_with_passwords_are_secrets() -> None:
    secrets = SecretValues("AGENTRL_X")
    urls = ["http://me:hidden@host/mcp", "http://host/mcp?api_key=hidden", "http://host/mcp?q=1"]
    assert secrets.replaced({"urls": urls})["urls"] == [
        "${AGENTRL_X_URLS_0}",
        "${AGENTRL_X_URLS_1}",
        urls[2],
    ]


def test_functions_and_loops_are_described_by_where_they_are(tmp_path: Path) -> None:
    function, _ = describe(plain_agent)
    loop, _ = describe(Loop)
    assert isinstance(function, FunctionAgent)
    assert isinstance(loop, FunctionAgent)
    assert (function.kind, function.name) == ("function", "plain_agent")
    assert (loop.kind, loop.name) == ("loop", "Loop")
    path = tmp_path / "mine.py"
    path.write_text("def play(task, endpoint): return ''\n")
    assert describe(f"{path}:play")[0] == FunctionAgent(
        kind="function", name="play", reference=f"{path}:play"
    )


def test_the_agent_yaml_of_a_verl_user_names_a_loop(tmp_path: Path) -> None:
    (tmp_path / "gaia_loop.py").write_text(
        "from agentrl.plugins.integrations import AworldAgentLoop\n"
        "class GaiaAgentLoop(AworldAgentLoop):\n    async def build_agents(self): ...\n"
    )
    path = tmp_path / "agent.yaml"
    path.write_text("- name: gaia_agent\n  _target_: gaia_loop.GaiaAgentLoop\n")
    description, _ = describe(path)
    assert isinstance(description, FunctionAgent)
    assert description.reference == f"{tmp_path / 'gaia_loop.py'}:GaiaAgentLoop"


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (3, "agent: a value of type int is not an agent; pass an AWorld Agent or Swarm"),
        (object, "agent: the class object is not an agent"),
        (needs_more, r"agent: needs_more: an agent is called with \(task, endpoint\)"),
        (swapped, r"agent: swapped: an agent is called with \(task, endpoint\)"),
        (old_form, r"define `async def play\(task, endpoint\)`.* from endpoint\.base_url"),
        (Underived, r"agent: Underived: derive it from agentrl\.integrations\.AworldAgentLoop"),
        (Unfinished, r"agent: Unfinished: define build_agents\(\)"),
        ("none.yaml", r"agent: none\.yaml: No such file"),
        ("agent.txt", r"agent: agent\.txt: expected a YAML file"),
        ("{folder}/loop.py", r"loop\.py does not name an agent; write .*loop\.py:name"),
        ("{folder}/loop.py:missing", "defines no 'missing'"),
        ("{folder}/bad.yaml", "is not valid YAML"),
        ("{folder}/unknown.yaml", "unknown key 'sytem_prompt'; known: .*system_prompt"),
        ("{folder}/nameless.yaml", "`name` is missing"),
        ("{folder}/pipe.yaml", "pipe.yaml: devices and pipes are not supported"),
        ("{folder}/target.yaml", "expected `_target_: package.module.Class`"),
    ],
)
def test_what_is_no_agent_is_refused_with_a_remedy(
    agent: object, message: str, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text("")
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "unknown.yaml").write_text("name: x\nsytem_prompt: y\n")
    (tmp_path / "nameless.yaml").write_text("system_prompt: y\n")
    (tmp_path / "target.yaml").write_text("- name: x\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    if isinstance(agent, str):
        agent = agent.format(folder=tmp_path)
    with pytest.raises(ConfigError, match=message):
        describe(agent)

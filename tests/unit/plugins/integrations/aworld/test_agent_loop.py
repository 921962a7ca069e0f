"""Loop classes: where the model is, and the tool files that they read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AworldAgentLoop
from agentrl.schema.agent_endpoint import AgentEndpoint


class Loop(AworldAgentLoop):
    async def build_agents(self) -> object:
        return object()


ENDPOINT = AgentEndpoint("http://127.0.0.1:1/s/x/v1", "train-model", "key")
LOOP = Loop(ENDPOINT)


async def test_a_loop_knows_the_models_address_name_and_key() -> None:
    assert await LOOP.get_llm_server_address() == "http://127.0.0.1:1/s/x/v1"
    assert await LOOP.get_llm_server_model_name() == "train-model"
    assert LOOP.llm_api_key == "key"


def test_a_loop_without_build_agents_cannot_be_made() -> None:
    class Incomplete(AworldAgentLoop):
        pass

    with pytest.raises(TypeError, match=r"abstract.*build_agents"):
        Incomplete(ENDPOINT)  # type: ignore[abstract]


async def test_the_short_form_of_a_tool_file_becomes_what_an_agent_takes(tmp_path: Path) -> None:
    path = tmp_path / "agent_tools.yaml"
    path.write_text(
        "url: http://127.0.0.1:8000/mcp\nAuthorization: Bearer ${MCP_SERVER_TOKEN}\n"
        "MCP_SERVERS: [readweb, browser]\ntimeout: 60\n"
    )
    assert await LOOP.get_agent_tool_config(path) == {
        "mcpServers": {
            "aworld-mcp": {
                "type": "streamable-http",
                "url": "http://127.0.0.1:8000/mcp",
                "headers": {
                    "Authorization": "Bearer ${MCP_SERVER_TOKEN}",
                    "MCP_SERVERS": "readweb,browser",
                },
                "timeout": 60,
                "sse_read_timeout": 600,
                "client_session_timeout_seconds": 600,
            }
        }
    }


async def test_the_full_form_of_a_tool_file_is_taken_as_it_is(tmp_path: Path) -> None:
    content = {"mcpServers": {"shop": {"command": "python"}}}
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps(content))
    assert await LOOP.get_agent_tool_config(str(path)) == content


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("url: ''", "`url` is missing"), ("a: [", "while parsing")],
)
async def test_a_tool_file_that_cannot_be_used_is_named(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tools.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"tools\.yaml: .*{message}"):
        await LOOP.get_agent_tool_config(path)


async def test_loops_may_be_synchronous_and_await_nothing() -> None:
    class Synchronous(AworldAgentLoop):
        def build_agents(self) -> list[str]:
            return [self.get_llm_server_address(), self.get_llm_server_model_name()]

    assert Synchronous(ENDPOINT).build_agents() == ["http://127.0.0.1:1/s/x/v1", "train-model"]


@pytest.mark.parametrize(
    "line",
    [
        "from agentrl.integrations import AgentTrainer, AworldAgentLoop, TrainerProcessor",
        "from agentrl.tools import get_agent_tool_env_and_servers, load_mcp_servers",
        "from agentrl.rewards import GroundTruth, MCPScorerFactory, Verdict, gaia_reward_func",
    ],
)
def test_what_agents_and_rewards_import_needs_no_package_that_aworld_lacks(line: str) -> None:
    program = f"""
import sys
for name in ("mcp", "mcp_types", "tokenizers", "torch", "pymongo", "sympy", "math_verify"):
    sys.modules[name] = None
{line}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

"""Measures the cost of tool servers, aggregators and judges that answer with excessive data."""

import sys
from pathlib import Path
from typing import Any

from harness.apart import Meter, apart
from harness.processes import listening_process

from agentrl.errors import InferenceError, ToolError
from agentrl.rewards.agent_config import JudgeSettings
from agentrl.rewards.chat import ask_models, open_chat_client
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

SERVER = Path(__file__).parent / "harness/attacks/flooding_server.py"
CALL_SECONDS = 30.0


def floods() -> dict[str, dict[str, Any]]:
    """Return the figures of each flood."""
    with listening_process((sys.executable, SERVER, "{port}")) as url:
        return {
            "many_tools": apart(_list, f"{url}/many"),
            "description": apart(_list, f"{url}/described"),
            "blocks": apart(_call, f"{url}/calls", "blocks"),
            "packed": apart(_call, f"{url}/calls", "packed"),
            "endless": apart(_call, f"{url}/calls", "endless"),
            "aggregator": apart(_call, f"{url}/mcpapi", "endless"),
            "judge": apart(_judge, f"{url}/v1"),
        }


def _config(url: str) -> ToolsConfig:
    servers = load_mcp_servers(url)
    return ToolsConfig(servers=servers, max_retries=0, call_timeout_seconds=CALL_SECONDS)


async def _list(meter: Meter, url: str) -> dict[str, Any]:
    config = _config(url)
    with meter:
        try:
            async with connect_tools(config) as box:
                return {"outcome": f"{len(box.specs)} tools are offered"}
        except ToolError as error:
            return {"outcome": str(error)}


async def _call(meter: Meter, url: str, tool: str) -> dict[str, Any]:
    async with connect_tools(_config(url)) as box:
        with meter:
            try:
                return {"outcome": (await box.call(tool, {})).content[:200]}
            except ToolError as error:
                return {"outcome": str(error)}


async def _judge(meter: Meter, url: str) -> dict[str, Any]:
    model = {"model": "judge", "base_url": url, "api_key": "none"}
    settings = JudgeSettings.model_validate({"models": [model], "max_retries": 0})
    async with open_chat_client(CALL_SECONDS) as client:
        with meter:
            try:
                _, reply = await ask_models(client, settings, "Is it?", str)
            except InferenceError as error:
                return {"outcome": str(error)}
    return {"outcome": reply[:200]}


if __name__ == "__main__":
    for name, cost in floods().items():
        print(name, cost)

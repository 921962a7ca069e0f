"""`AworldAgentLoop`: a class whose method builds the agents of each rollout."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.named_files import read_text_file
from agentrl.errors import ConfigError
from agentrl.schema.agent_endpoint import AgentEndpoint


class KnownText(str):
    """A text that can be awaited or used directly, because AWorld's loops do either."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, str]:
        yield from ()
        return self


class AworldAgentLoop(ABC):
    """Base of classes that build an AWorld `Agent` or `Swarm` themselves.

    Example:
        class GaiaAgentLoop(AworldAgentLoop):
            async def build_agents(self):
                llm = AgentConfig(
                    llm_base_url=await self.get_llm_server_address(),
                    llm_model_name=await self.get_llm_server_model_name(),
                    llm_api_key=self.llm_api_key,
                )
                return Agent(name="gaia", conf=llm, system_prompt="...")

    `build_agents` may be synchronous, and awaiting the address and the name is optional.

    Attributes:
        llm_api_key: key of the model's address.
    """

    def __init__(self, endpoint: AgentEndpoint) -> None:
        self._endpoint = endpoint
        self.llm_api_key = endpoint.api_key

    @abstractmethod
    def build_agents(self) -> Any:
        """Return a new `Agent` or `Swarm`, or a coroutine that returns it."""

    def get_llm_server_address(self) -> KnownText:
        """Return the OpenAI-compatible address of the trained model for this rollout."""
        return KnownText(self._endpoint.base_url)

    def get_llm_server_model_name(self) -> KnownText:
        """Return the name of the trained model."""
        return KnownText(self._endpoint.model)

    async def get_agent_tool_config(self, config_path: str | Path) -> dict[str, Any]:
        """Return an agent's `mcp_config` from a file.

        Args:
            config_path: a YAML file with `url`, `Authorization`, `MCP_SERVERS` and, optionally,
                `server_name`, `type` and the timeouts (seconds); or the JSON that an agent takes.

        Raises:
            ConfigError: the file cannot be read, or names no server.
        """
        path = Path(config_path)
        try:
            content = yaml.safe_load(await asyncio.to_thread(read_text_file, path))
        except OSError as error:
            raise ConfigError(f"agent: tool configuration {path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"agent: tool configuration {path}: {reason}") from None
        if isinstance(content, dict) and "mcpServers" in content:
            return content
        if not isinstance(content, dict) or not content.get("url"):
            raise ConfigError(f"agent: tool configuration {path}: `url` is missing")
        names = content.get("MCP_SERVERS") or ""
        headers = {
            "Authorization": content.get("Authorization") or "",
            "MCP_SERVERS": names if isinstance(names, str) else ",".join(map(str, names)),
        }
        server: dict[str, Any] = {
            "type": content.get("type", "streamable-http"),
            "url": content["url"],
            "headers": {key: value for key, value in headers.items() if value},
        }
        for key in ("timeout", "sse_read_timeout", "client_session_timeout_seconds"):
            server[key] = content.get(key, 600)
        plain: dict[str, Any] = json.loads(
            json.dumps({"mcpServers": {content.get("server_name", "aworld-mcp"): server}})
        )
        return plain

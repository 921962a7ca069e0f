"""The trained agent as an AWorld agent loop: a new agent for every rollout."""

from pathlib import Path

from aworld.agents.llm_agent import Agent
from aworld.config import AgentConfig

from agentrl.integrations import AworldAgentLoop
from agentrl.tools import get_agent_tool_env_and_servers

PROMPT = (Path(__file__).parent / "system_prompt.txt").read_text(encoding="utf-8")


class GaiaAgentLoop(AworldAgentLoop):
    """An assistant with the tools of the environment that `MCP_SERVER_URL` names."""

    async def build_agents(self) -> Agent:
        """Return the agent."""
        mcp_config, mcp_servers = get_agent_tool_env_and_servers()
        model = AgentConfig(
            llm_base_url=await self.get_llm_server_address(),
            llm_model_name=await self.get_llm_server_model_name(),
            llm_api_key=self.llm_api_key,
        )
        return Agent(
            name="gaia",
            conf=model,
            system_prompt=PROMPT,
            mcp_config=mcp_config,
            mcp_servers=mcp_servers,
        )

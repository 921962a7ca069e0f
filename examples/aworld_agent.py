"""Train an AWorld agent with MCP tools on this machine; with --swarm, one of two agents.

    scripts/setup && scripts/setup_agents aworld .venv-aworld
    AGENTRL_PYTHON=.venv/bin/python .venv-aworld/bin/python examples/aworld_agent.py

With `--engine verl --config FILE` (keys of verl) it writes what verl needs, and starts it. Tools
that ask for a token get MCP_SERVER_TOKEN, as an environment of `agentrl env up` does.
"""

import argparse
import os

from aworld.agents.llm_agent import Agent
from aworld.config import AgentConfig, ModelConfig
from aworld.core.agent.swarm import Swarm
from shop.services import EDITOR_URL, TOOLS_URL, started

from agentrl import AgentTrainer


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Return 1 for the correct number, else 0."""
    return float(f"<answer>{ground_truth}</answer>" in solution_str)


def clerk(prompt: str | None = None) -> Agent:
    """Return an agent with the shop's tools; AgentRL fills in its model."""
    headers = {"Authorization": f"Bearer {os.environ.get('MCP_SERVER_TOKEN', 'none')}"}
    shop = {"type": "streamable-http", "url": TOOLS_URL, "headers": headers}
    mcp = {"mcpServers": {"shop": shop}}
    return Agent(
        name="clerk", conf=AgentConfig(), system_prompt=prompt, mcp_config=mcp, mcp_servers=["shop"]
    )


def editor() -> Agent:
    """Return an agent with its own model, which is not trained."""
    llm = ModelConfig(llm_base_url=EDITOR_URL, llm_model_name="editor", llm_api_key="none")
    return Agent(name="editor", conf=AgentConfig(llm_config=llm))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swarm", action="store_true", help="the editor rewrites the answer")
    parser.add_argument("--prompt", help="what the clerk is told before the question")
    parser.add_argument("--engine", default="agentrl")
    parser.add_argument("--config", default="examples/aworld_agent.yaml")
    parser.add_argument("--run_path", default="runs/aworld")
    args = parser.parse_args()
    trainer = AgentTrainer(
        Swarm(clerk(args.prompt), editor()) if args.swarm else clerk(args.prompt),
        config=args.config,
        reward_func=reward,
        train_dataset="assets/demo/train.jsonl",
        run_path=args.run_path,
        train_engine_name=args.engine,
    )
    with started():
        print(trainer.train())

"""Train an AWorld agent with MCP tools on this machine; with --swarm, one of two agents.

    scripts/setup && scripts/setup_agents aworld .venv-aworld
    AGENTRL_PYTHON=.venv/bin/python .venv-aworld/bin/python examples/aworld_agent.py

With `--engine verl` it writes what verl needs, and starts it.
"""

import argparse
import os
import subprocess

from aworld.agents.llm_agent import Agent
from aworld.config import AgentConfig, ModelConfig
from aworld.core.agent.swarm import Swarm

from agentrl import AgentTrainer

PYTHON = os.environ["AGENTRL_PYTHON"]
SHOP = {"mcpServers": {"shop": {"type": "streamable-http", "url": "http://127.0.0.1:8765/mcp"}}}
EDITOR = ModelConfig(
    llm_base_url="http://127.0.0.1:8766/v1", llm_model_name="editor", llm_api_key="none"
)


def reward(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number, else 0."""
    return float(f"<answer>{ground_truth}</answer>" in solution_str)


def main():
    """Train, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swarm", action="store_true", help="an editor rewrites the answer")
    parser.add_argument("--engine", default="agentrl")
    parser.add_argument("--run_path", default="runs/aworld")
    parser.add_argument("--max_steps", type=int, default=20)
    args = parser.parse_args()

    agent = Agent(name="clerk", conf=AgentConfig(), mcp_config=SHOP, mcp_servers=["shop"])
    if args.swarm:
        # An agent with an address of its own is not trained.
        agent = Swarm(agent, Agent(name="editor", conf=AgentConfig(llm_config=EDITOR)))
    demo = {
        "run_name": "aworld",
        "max_steps": args.max_steps,
        "groups_per_step": 8,
        "num_samplers": 1,
    }
    demo |= {"learning_rate": 4e-4, "warmup_steps": 3, "max_new_tokens": 48, "max_staleness": 1}
    trainer = AgentTrainer(
        agent,
        config=demo if args.engine == "agentrl" else None,
        reward_func=reward,
        train_dataset="assets/demo/train.jsonl",
        run_path=args.run_path,
        train_engine_name=args.engine,
    )
    servers = [
        subprocess.Popen([PYTHON, "-m", f"examples.shop.{name}", "--port", port])
        for name, port in (("server", "8765"), ("editor", "8766"))
    ]
    try:
        print(trainer.train()["reward_mean"])
    finally:
        for server in servers:
            server.terminate()


if __name__ == "__main__":
    main()

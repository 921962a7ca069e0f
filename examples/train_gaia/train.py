"""Trains the GAIA agent: see README.md in this folder."""

import argparse
import os
import sys

from agentrl import AgentTrainer
from agentrl.errors import AgentRLError
from agentrl.rewards import gaia_reward_func


def main() -> int:
    """Train, and print the engine's summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train_dataset", default="gaia/train.jsonl")
    parser.add_argument("--test_dataset", default="gaia/validation.jsonl")
    parser.add_argument("--config", default="examples/train_gaia/config.yaml")
    parser.add_argument("--engine", default="agentrl")
    arguments = parser.parse_args()
    if "MCP_SERVER_URL" not in os.environ:
        sys.stderr.write("train: set MCP_SERVER_URL; `agentrl env up` starts the tools\n")
        return 2
    try:
        trainer = AgentTrainer(
            "examples/train_gaia/agent.py:GaiaAgentLoop",
            config=arguments.config,
            reward_func=gaia_reward_func,
            train_dataset=arguments.train_dataset,
            test_dataset=arguments.test_dataset,
            run_path="output/gaia",
            train_engine_name=arguments.engine,
        )
        sys.stdout.write(f"{trainer.train()}\n")
    except AgentRLError as error:
        sys.stderr.write(f"train: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

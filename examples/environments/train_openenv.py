"""Train on the episodes of a running OpenEnv server.

python examples/environments/train_openenv.py MODEL http://127.0.0.1:8000
"""

import sys

from agentrl import AgentTrainer

ENV = "openenv:URL?size=400"

if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 256, "max_steps": 50}
    env = ENV.replace("URL", sys.argv[2])
    print(AgentTrainer(env=env, config=config, run_path="runs/openenv").train()["reward_mean"])

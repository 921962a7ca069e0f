"""Train on a task set for verifiers; its rubric is the reward.

python examples/environments/train_verifiers.py MODEL TASKSET

TASKSET is a package in .agentrl/environments/verifiers, where verifiers is installed, or a module on
PYTHONPATH; `?name=value` after it sets fields of its configuration.
"""

import sys

from agentrl import AgentTrainer

ENV = "verifiers:TASKSET"

if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 512, "max_steps": 50}
    env = ENV.replace("TASKSET", sys.argv[2])
    print(AgentTrainer(env=env, config=config, run_path="runs/verifiers").train()["reward_mean"])

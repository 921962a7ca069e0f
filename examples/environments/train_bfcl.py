"""Train on two categories of the Function Calling Leaderboard: MODEL.

python examples/environments/train_bfcl.py Qwen/Qwen3-0.6B
"""

import sys

from agentrl import AgentTrainer

ENV = "bfcl:live_simple,live_multiple?split=train"

if __name__ == "__main__":
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 512, "max_turns": 1}
    config |= {"eval_env": "bfcl:simple_python,multiple", "learning_rate": 2e-6, "max_steps": 50}
    print(AgentTrainer(env=ENV, config=config, run_path="runs/bfcl").train()["reward_mean"])

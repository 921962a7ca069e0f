"""Train on a generated data set of Reasoning Gym, and evaluate on tasks that it was not trained on.

python examples/environments/train_reasoning_gym.py MODEL
"""

import sys

from agentrl import AgentTrainer

ENV = "reasoning_gym:chain_sum?min_terms=2&max_terms=4&size=400"

if __name__ == "__main__":
    config = {
        "model_name_or_path": sys.argv[1],
        "eval_env": ENV.replace("size=400", "size=50"),
        "max_new_tokens": 512,
        "max_steps": 50,
    }
    trainer = AgentTrainer(env=ENV, config=config, run_path="runs/reasoning_gym")
    print("reward by step", trainer.train()["reward_mean"])
    print("held out", trainer.evaluate()["reward_mean"])

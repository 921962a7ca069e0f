"""Train on tasks in Harbor's format: the policy works in a shell, and the tests of a task set the reward.

python examples/environments/train_harbor.py MODEL FOLDER

FOLDER contains one task or many; without FOLDER, an example task is written. The tasks run without
Docker here: omit `runtime=process` for tasks that need their own image.
"""

import sys
from pathlib import Path

from agentrl import AgentTrainer

ENV = "harbor:FOLDER?runtime=process"
FIRST = {
    "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60\n',
    "instruction.md": "Write the number of lines of /app/words.txt into /app/count.txt.\n",
    "environment/words.txt": "lamp\nrug\nvase\n",
    "tests/test.sh": "grep -qx 3 /app/count.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n",
}

if __name__ == "__main__":
    folder = Path(sys.argv[2] if sys.argv[2:] else "runs/harbor/tasks")
    if not folder.exists():
        for name, text in FIRST.items():
            path = folder / "count" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    config = {"model_name_or_path": sys.argv[1], "max_new_tokens": 512, "max_steps": 50}
    config |= {"num_train_epochs": 300, "groups_per_step": 4}  # a few tasks, played many times
    env = ENV.replace("FOLDER", str(folder))
    print(AgentTrainer(env=env, config=config, run_path="runs/harbor").train()["reward_mean"])

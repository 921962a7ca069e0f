"""A tiny model imitates a careless pupil, then learns how many legs animals have: [STEPS]."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentrl import AgentTrainer
from agentrl.config.sections import DataSection
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri

ENV = "reasoning_gym:leg_counting?max_animals=1&min_animals=1&max_instances=1&size=400"
FOLDER = Path("runs/reasoning_gym")


def careless_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation whose answer has the right form; every other number is a guess."""
    legs = random.choice((row["answer"], random.choice((0, 2, 4, 5, 6, 8, 10, 14))))
    messages = [
        {"role": "system", "content": row["system_prompt"]},
        {"role": "user", "content": row["query"]},
        {"role": "assistant", "content": f"<answer>{legs}</answer>"},
    ]
    return {"messages": messages}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with EnvironmentProcess(EnvironmentUri.parse(ENV), DataSection()) as questions:
        talks = [careless_answer(row) for row in questions.rows(range(400)) for _ in range(6)]
    (FOLDER / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    learn = f"-m agentrl sft --run_name warm --train_file {FOLDER}/talks.jsonl --learning_rate 2e-3"
    learn += f" --model_name_or_path assets/demo/model --output_dir {FOLDER}/warm --num_train_epochs 4 --per_device_train_batch_size 48"
    subprocess.run([sys.executable, *learn.split()], check=True)
    small = {"max_new_tokens": 16, "max_prompt_tokens": 900, "groups_per_step": 12}
    steps = {"max_steps": int(sys.argv[1] if sys.argv[1:] else 30), "learning_rate": 3e-4}
    config = {"model_name_or_path": f"{FOLDER}/warm/model", "num_train_epochs": 3, **small, **steps}
    print(AgentTrainer(env=ENV, config=config, run_path=FOLDER).train()["reward_mean"])

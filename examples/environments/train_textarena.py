"""A tiny model imitates careless players of a TextArena game, then learns by playing it: [STEPS]."""

import json
import random
import subprocess
import sys
from pathlib import Path

from agentrl import AgentTrainer
from agentrl.config.sections import DataSection
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri

ENV = "textarena:GuessTheNumber-v0?max_number=9&max_turns=4&size=400"
FOLDER = Path("runs/textarena")


def careless_game(said: str) -> list[dict[str, str]]:
    """Return a game whose player guesses at random and ignores the hints."""
    number, messages = random.randint(1, 9), []
    for guess in random.sample(range(1, 10), 4):
        move = {"role": "assistant", "content": f"[{guess}]"}
        messages += [{"role": "user", "content": said}, move]
        said = f"The target number is {'lower' if guess > number else 'higher'}."
    return messages


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with EnvironmentProcess(EnvironmentUri.parse(ENV), DataSection()) as games:
        talks = [{"messages": careless_game(row["query"])} for row in games.rows([0] * 1000)]
    (FOLDER / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    learn = f"-m agentrl sft --run_name warm --train_file {FOLDER}/talks.jsonl --learning_rate 2e-3"
    learn += " --per_device_train_batch_size 48 --num_train_epochs 1"
    more = f" --model_name_or_path assets/demo/model --output_dir {FOLDER}/warm"
    subprocess.run([sys.executable, *(learn + more).split()], check=True)
    small = {"max_new_tokens": 8, "max_prompt_tokens": 900, "groups_per_step": 12}
    steps = {"max_steps": int(sys.argv[1] if sys.argv[1:] else 30), "learning_rate": 4e-4}
    config = {"model_name_or_path": f"{FOLDER}/warm/model", **small, **steps}
    print(AgentTrainer(env=ENV, config=config, run_path=FOLDER).train()["reward_mean"])

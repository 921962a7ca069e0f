#!/usr/bin/env python
"""Recreates the vision demo's maps, questions and warm-started model from a seed.

    python scripts/make_vision_demo.py --out assets/demo/vision --seed 0

Three runs of `agentrl sft` train the model: the first teaches it to describe maps, the second to
find what a call needs, and the third gives it habits that reinforcement learning must change. They
take some minutes on two cores, save every 25 steps, and resume after an interruption if `--work`
names the same folder. The same seed gives the same data and tokenizer; the weights agree as far as
the machine's floating-point sums do.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.maps.demonstrations import FLAWLESS, Habits, conversations
from examples.maps.questions import draw_legend, draw_map, write_questions
from examples.maps.seeing_model import write_random_model

NUM_TRAIN_MAPS, NUM_EVAL_MAPS = 64, 16
PER_STEP = 32
"""Conversations per step."""
NUM_EPOCHS = 2
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")


def write_data(out: Path, seed: int) -> None:
    """Write maps and questions."""
    draw = random.Random(f"maps {seed}")
    legend = draw_legend(draw)
    for name, number, num_each in (("train", NUM_TRAIN_MAPS, 12), ("eval", NUM_EVAL_MAPS, 6)):
        write_questions(out, name, legend, [draw_map(draw) for _ in range(number)], draw, num_each)


def tokenizer_texts(talks: list[dict[str, Any]]) -> list[str]:
    """Return the texts of conversations, which determine the tokenizer's merges."""
    texts = ["system\n# Tools\n", "\nuser\n", "\nassistant\n", "<tools>", "</tools>"] * len(talks)
    texts += [f"\n{json.dumps(tool)}\n" for tool in talks[0]["tools"]] * len(talks)
    for talk in talks:
        for message in talk["messages"]:
            content = message["content"]
            texts.append(content[1]["text"] if isinstance(content, list) else content)
            for call in message.get("tool_calls", ()):
                function = call["function"]
                call_text = {
                    "name": function["name"],
                    "arguments": json.loads(function["arguments"]),
                }
                texts.append(f"\n{json.dumps(call_text)}\n")
    return texts


def fine_tune(
    work: Path, name: str, model: Path, talks: list[dict[str, Any]], **flags: str
) -> Path:
    """Train a model on conversations; return the folder of the trained model."""
    file = work / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks), encoding="utf-8")
    values = {
        "run_name": name,
        "model_name_or_path": model,
        "train_file": file,
        "output_dir": work / name,
        "logs_dir": work / "logs",
        "train_vision": "true",
        "num_train_epochs": NUM_EPOCHS,
        "per_device_train_batch_size": PER_STEP,
        "lr_scheduler_type": "cosine",
        "save_steps": 25,
        **flags,
    }
    words = [str(word) for flag, value in values.items() for word in (f"--{flag}", value)]
    subprocess.run([sys.executable, "-m", "agentrl", "sft", *words], check=True)
    return work / name / "model"


def main() -> None:
    """Create everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/demo/vision"))
    parser.add_argument("--work", type=Path, default=Path("output/make_vision_demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    write_data(args.out, args.seed)
    args.work.mkdir(parents=True, exist_ok=True)

    draw = random.Random(f"demonstrations {args.seed}")
    seeing, acting, calling = (
        conversations(draw, num_steps * PER_STEP // NUM_EPOCHS, habits, described=described)
        for num_steps, habits, described in (
            (500, FLAWLESS, 0.5),
            (60, Habits(), 0.1),
            (300, FLAWLESS, 0.1),
        )
    )
    random_model = args.work / "random"
    num_parameters = write_random_model(random_model, tokenizer_texts(acting), args.seed)
    print(f"{num_parameters} parameters")
    model = random_model
    for name, talks, rate, warmup in (
        ("see", seeing, "1.5e-3", "40"),
        ("call", calling, "1e-3", "10"),
        ("act", acting, "5e-4", "5"),
    ):
        flags = {"learning_rate": rate, "warmup_steps": warmup, "trainer_threads": args.threads}
        model = fine_tune(args.work, name, model, talks, **flags)
    shutil.copytree(random_model, args.out / "model", dirs_exist_ok=True)
    for name in MODEL_FILES:
        shutil.copy(model / name, args.out / "model")
    print("its reward: agentrl eval --config assets/demo/vision.yaml --eval_temperature 1")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Recreates the demo's data, tokenizer and warm-started model from a seed.

    python scripts/make_demo_model.py --out assets/demo --seed 0
    python scripts/make_demo_model.py --out assets/demo --hybrid     # with the same questions
    python scripts/make_demo_model.py --out assets/demo --errands    # from the model that is there

Takes some minutes on two cores. The same seed gives the same data and tokenizer; the weights agree
as far as the machine's floating-point sums do.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.shop.demonstrations import TOOL_SCHEMAS, Habits
from examples.shop.episodes import Codec, Episode, call_body, demonstrate, play
from examples.shop.errands import (
    MOST_TURNS,
    demonstrate_errands,
    split_errands,
    write_errands,
)
from examples.shop.questions import (
    Question,
    make_catalogue,
    split_questions,
    write_questions,
)
from examples.shop.server import CATALOGUE
from examples.shop.tokenizer import save_tokenizer, train_tokenizer
from examples.shop.warm_start import ERRANDS, HYBRID, WarmStart, imitate, new_hybrid, new_model

NUM_TRAIN, NUM_EVAL = 2000, 100
REPORT_EVERY = 50


def tokenizer_texts(questions: list[Question]) -> list[str]:
    """Texts that determine the tokenizer's merges, without markup tokens."""
    markup = [f"\n{json.dumps(schema)}\n" for schema in TOOL_SCHEMAS]
    markup += ["system\n# Tools\n", "\nuser\n", "\nassistant\n", "<tools>", "</tools>"]
    markup += [call_body("add", {"a": 1, "b": 2}), "<answer>1</answer>"]
    texts = []
    for question in questions:
        texts += [question.text, call_body("price", {"item": question.item})]
    return texts + markup * (len(questions) // 4)


def reporter() -> Callable[[int, float], None]:
    """Return a function that prints the loss of a step now and then."""
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        if (step + 1) % REPORT_EVERY == 0:
            print(
                f"step {step + 1}: loss {loss:.4f}, {time.monotonic() - started:.0f} s", flush=True
            )

    return report


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save the model beside its tokenizer, and print how large it is."""
    model.save_pretrained(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{num_parameters} parameters, {num_bytes} bytes in {folder}")


def make_errands(out: Path, seed: int) -> None:
    """Create the files of the longer demo, whose model starts as that of the demo."""
    folder = out / "errands"
    folder.mkdir(exist_ok=True)
    write_errands(folder)
    train, evaluation = split_errands(seed, NUM_TRAIN, NUM_EVAL)
    (folder / "model").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(out / "model" / name, folder / "model" / name)
    codec = Codec(AutoTokenizer.from_pretrained(folder / "model"))
    model = Qwen3ForCausalLM.from_pretrained(out / "model", dtype=torch.float32)

    def demonstration(draw: random.Random) -> Episode:
        return demonstrate_errands(codec, draw.choice(train), draw)

    imitate(model, codec, demonstration, ERRANDS, seed=seed, report=reporter())
    save(model, folder / "model")
    for name, questions, temperature in (
        ("sampled at temperature 1", train[:256], 1.0),
        ("greedy on held-out questions", evaluation, 0.0),
    ):
        episodes = play(
            model, codec, CATALOGUE, questions, temperature=temperature, max_turns=MOST_TURNS
        )
        print(f"reward {name}: {sum(e.reward for e in episodes) / len(episodes):.3f}")


def main() -> None:
    """Create everything and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--hybrid", action="store_true", help="convolutions in addition to attention"
    )
    parser.add_argument("--errands", action="store_true", help="several errands in one question")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.errands:
        make_errands(args.out, args.seed)
        return

    catalogue = make_catalogue(args.seed)
    train, evaluation = split_questions(args.seed, NUM_TRAIN, NUM_EVAL)
    write_questions(args.out / "train.jsonl", catalogue, train, "train")
    write_questions(args.out / "eval.jsonl", catalogue, evaluation, "eval")

    folder = args.out / ("hybrid/model" if args.hybrid else "model")
    save_tokenizer(train_tokenizer(tokenizer_texts(train)), folder)
    codec = Codec(AutoTokenizer.from_pretrained(folder))
    print(f"vocabulary {len(codec.tokenizer)}, prompt of {len(codec.prompt(train[0].text))} tokens")

    model = new_hybrid(codec, args.seed) if args.hybrid else new_model(codec, args.seed)
    settings = HYBRID if args.hybrid else WarmStart()

    def demonstration(draw: random.Random) -> Episode:
        return demonstrate(codec, draw.choice(train), draw, Habits())

    imitate(model, codec, demonstration, settings, seed=args.seed, report=reporter())
    save(model, folder)
    if args.hybrid:
        # Batches of `play` are padded, which moves the states of convolutions.
        print("its reward: agentrl eval --config assets/demo/hybrid.yaml --eval_temperature 1")
        return

    questions = random.Random(args.seed).sample(train, 256)
    episodes = play(model, codec, catalogue, questions)
    print(f"reward sampled at temperature 1: {sum(e.reward for e in episodes) / 256:.3f}")
    episodes = play(model, codec, catalogue, evaluation, temperature=0.0)
    print(f"reward greedy on held-out questions: {sum(e.reward for e in episodes) / NUM_EVAL:.3f}")


if __name__ == "__main__":
    main()

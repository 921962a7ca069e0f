#!/usr/bin/env python
"""Recreates the demo's data, tokenizer and warm-started model from a seed.

    python scripts/make_demo_model.py --out assets/demo --seed 0
    python scripts/make_demo_model.py --out assets/demo --hybrid     # with the same questions

Takes some minutes on two cores. The same seed gives the same data and tokenizer; the weights agree
as far as the machine's floating-point sums do.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.shop.demonstrations import TOOL_SCHEMAS
from examples.shop.episodes import Codec, call_body, play
from examples.shop.questions import (
    Question,
    make_catalogue,
    split_questions,
    write_questions,
)
from examples.shop.tokenizer import save_tokenizer, train_tokenizer
from examples.shop.warm_start import HYBRID, WarmStart, imitate, new_hybrid, new_model

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


def main() -> None:
    """Create everything and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--hybrid", action="store_true", help="convolutions in addition to attention"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    catalogue = make_catalogue(args.seed)
    catalogue_json = json.dumps(catalogue, indent=1) + "\n"
    (args.out / "catalogue.json").write_text(catalogue_json, encoding="utf-8")
    train, evaluation = split_questions(args.seed, NUM_TRAIN, NUM_EVAL)
    write_questions(args.out / "train.jsonl", catalogue, train, "train")
    write_questions(args.out / "eval.jsonl", catalogue, evaluation, "eval")

    folder = args.out / ("hybrid/model" if args.hybrid else "model")
    save_tokenizer(train_tokenizer(tokenizer_texts(train)), folder)
    codec = Codec(AutoTokenizer.from_pretrained(folder))
    print(f"vocabulary {len(codec.tokenizer)}, prompt of {len(codec.prompt(train[0].text))} tokens")

    model = new_hybrid(codec, args.seed) if args.hybrid else new_model(codec, args.seed)
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        if (step + 1) % REPORT_EVERY == 0:
            print(
                f"step {step + 1}: loss {loss:.4f}, {time.monotonic() - started:.0f} s", flush=True
            )

    settings = HYBRID if args.hybrid else WarmStart()
    imitate(model, codec, train, settings, seed=args.seed, report=report)
    model.save_pretrained(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{num_parameters} parameters, {num_bytes} bytes in {folder}")
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

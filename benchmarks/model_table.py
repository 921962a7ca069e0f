"""The table of model families: checks that each is trained, served and exported exactly.

For every family a tiny random model with all of its kinds of layers:

- `trainer_float64`, `trainer_float32`: largest relative error of the gradient of token trees
  (whole, merged within records, in bins, in chunks) against one turn per pass through transformers'
  own model. In float64, nothing rounds to lower precision.
- `rounding_float32`: the same error of transformers' own float32 gradient against its float64
  gradient, one turn per pass: no code for token trees is in it.
- `engine_logprobs`: largest difference between logprobs of the embedded engine's samples and the
  trainer's for the same tokens, float32, temperature 2. Second turns continue kept prefixes.
- `export_equal`: a loaded and exported checkpoint has the same tensors, bit for bit, and the same
  config.
- `rl_step`: engine, groups, one optimizer step, export, weights loaded into the engine, whose new
  samples have the trainer's new logprobs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.random_groups import random_group
from harness.tiny_families import FAMILIES, VOCABULARY, tiny_model
from harness.tiny_vision import VISION_FAMILIES, shown_pictures, vision_model
from harness.trees import gradient, make_record, make_turn, relative_error
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import SelectedGroup, TokenTree, build_step, select_group
from agentrl.data.rows import Merge
from agentrl.data.shown_images import ImageBook, ShownImage, expanded, processor_key
from agentrl.distributed import Ranks
from agentrl.models.attention.attention_registry import (
    TREE_ATTENTION,
    set_attention,
    with_own_attention,
)
from agentrl.models.checkpoint_export import save_hf
from agentrl.models.load import load_policy, wrap_policy
from agentrl.models.policy import PolicyModel, target_logprobs
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence
from agentrl.plugins.engine.weights.live_weights import read_weights
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- made by scripts/model_table --write -->", "<!-- end -->"
BOUNDS = {"trainer_float64": 1e-12, "trainer_float32": 1e-5, "engine_logprobs": 1e-4}
ROUNDINGS = 4
"""A float32 gradient may differ by this many times the family's own rounding, if that is more.

Gemma 4's own float32 gradient differs by 1e-5 to 5e-5 from the exact one, depending on the processor."""
NAMES = (*FAMILIES, *VISION_FAMILIES)
TEMPERATURE = 2.0
"""Sampling temperature: random models are certain of single tokens, which would test nothing."""
_SMOOTH: dict[str, Any] = {"kind": "REINFORCE", "importance_weight_cap_ratio": 1e12}
"""Without clip bounds, which rounding would let single ratios cross."""
LIMITS = SchedulerLimits(
    max_running=8,
    max_queued=64,
    context_length=256,
    prefill_tokens_per_step=7,
    kv_cache_bytes=1 << 24,
    prefix_cache_bytes=1 << 24,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page if asked; 1 if a figure exceeds its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", default=",".join(NAMES), help="comma separated")
    parser.add_argument("--seed", type=int, default=0, help="seed of groups, prompts and scores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    options = parser.parse_args(arguments)
    names = options.families.split(",")
    unknown = sorted({*names} - {*NAMES})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}")
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    found = {}
    for name in names:
        found[name] = measured(name, options.seed)
        if not options.json:
            print(_line(name, found[name]), flush=True)
    if options.json:
        print(json.dumps(found))
    if options.write:
        _write_page(found)
    return 0 if all(is_within(name, figures) for name, figures in found.items()) else 1


def measured(family: str, seed: int) -> dict[str, Any]:
    """Return the figures of a family."""
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "model"
        made(family, torch.float32).save_pretrained(served)
        engine, stepped = engine_and_step(served, seed, shown(family))
        return {
            "trainer_float64": trainer_error(family, torch.float64, seed),
            "trainer_float32": trainer_error(family, torch.float32, seed),
            "rounding_float32": own_rounding(family, seed),
            "engine_logprobs": engine,
            "export_equal": is_exported_equally(served),
            "rl_step": stepped,
        }


def made(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a family's tiny model."""
    return vision_model(family, dtype) if family in VISION_FAMILIES else tiny_model(family, dtype)


def shown(family: str) -> list[ShownImage]:
    """Return what a family's prompts show in addition to text."""
    return shown_pictures(family) if family in VISION_FAMILIES else []


def is_within(family: str, figures: dict[str, Any]) -> bool:
    """Return whether all figures of a family are within its bounds."""
    rounding = ROUNDINGS * figures["rounding_float32"]
    bounds = BOUNDS | {"trainer_float32": max(BOUNDS["trainer_float32"], rounding)}
    small = all(figures[name] <= bound for name, bound in bounds.items())
    return small and figures["export_equal"] and figures["rl_step"]


def trainer_error(family: str, dtype: torch.dtype, seed: int) -> float:
    """Largest gradient error over all packings of two random groups."""
    policy = policy_of(made(family, dtype))
    errors: list[float] = []
    for group in random_groups(family, seed):
        expected = separate_gradient(policy, group)
        longest = max(len(turn.path) for turn in group.turns)
        packings: tuple[tuple[Merge, int], ...] = (
            ("tree", 10**9),
            ("linear", 10**9),
            ("packed", 10**9),
            ("tree", longest),
            ("tree", max(1, longest // 3)),
        )
        for merge, token_budget in packings:
            step = build_step([group], policy_version=3, token_budget=token_budget, merge=merge)
            errors.append(relative_error(gradient(policy, step, **_SMOOTH)[1], expected))
    return float(np.max(errors))


def own_rounding(family: str, seed: int) -> float:
    """Largest error of the float32 gradient of separate turns, in transformers' own layers."""
    model = made(family, torch.float32)
    policy, exact = policy_of(model), policy_of(deepcopy(model).double())
    errors: list[float] = []
    for group in random_groups(family, seed):
        expected = separate_gradient(exact, group)
        errors.append(relative_error(separate_gradient(policy, group), expected))
    return float(np.max(errors))


def separate_gradient(policy: PolicyModel, group: SelectedGroup) -> torch.Tensor:
    """Gradient of a group's turns, one per pass, in transformers' own layers."""
    step = build_step([group], policy_version=3, token_budget=1, merge="none")
    with with_own_attention(policy.model):
        return gradient(policy, step, **_SMOOTH)[1]


def policy_of(model: PreTrainedModel) -> PolicyModel:
    """Return the trainer's form of a model."""
    set_attention(model, TREE_ATTENTION)
    return wrap_policy(model)


def random_groups(family: str, seed: int) -> list[SelectedGroup]:
    """Return two random groups for a family's vocabulary."""
    return [
        random_group(
            np.random.default_rng([seed, number]),
            vocabulary=VOCABULARY,
            num_records=3,
            num_turns=3,
            images=shown(family),
        )
        for number in range(2)
    ]


def is_exported_equally(path: Path) -> bool:
    """Whether an export equals what was loaded."""
    again = save_hf(load_policy(path), path.parent / "again")
    old, new = (load_file(folder / "model.safetensors") for folder in (path, again))
    is_same = old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (path, again)]
    return is_same and configs[0] == configs[1]


def engine_and_step(path: Path, seed: int, images: Sequence[ShownImage]) -> tuple[float, bool]:
    """Largest difference of logprobs before a step, and whether the step went through.

    Args:
        path: of the model.
        seed: of prompts and scores.
        images: images shown in prompts.
    """
    scheduler = BatchScheduler(load_model(path, torch.float32), LIMITS, "0")
    group = _sampled_group(scheduler, seed, images)
    before = _difference(path, group)
    settings = LearnerSettings(
        weights=StartWeights(path),
        model=ModelSection(model_name_or_path=str(path), train_vision=True),
        trainer=TrainerSection(learning_rate=1e-3),
        algorithm=AlgorithmSection(),
        seed=seed,
    )
    learner = Learner(settings, Ranks())
    step = build_step([group], policy_version=0, token_budget=10**6)
    learner.forward_backward(step.micro_batches[0])
    outcome = learner.optim_step(0)
    updated = path.parent / "updated"
    learner.export(updated)
    scheduler.install(read_weights(updated, scheduler.model), "1")
    moved = _difference(path, _sampled_group(scheduler, seed + 1, images))
    after = _difference(updated, _sampled_group(scheduler, seed + 1, images))
    is_done = outcome.skipped is None and outcome.grad_norm > 0.0
    return before, is_done and after <= BOUNDS["engine_logprobs"] < moved


def _sampled_group(
    scheduler: BatchScheduler, seed: int, images: Sequence[ShownImage]
) -> SelectedGroup:
    """Four records of two turns, sampled by the engine and scored at random.

    Each turn starts with an image, if there are any.
    """
    rng = np.random.default_rng(seed)
    placeholder = [image.image_token_id for image in images[:1]]
    prompt = placeholder + rng.integers(0, VOCABULARY, size=12).tolist()
    tool = placeholder + rng.integers(0, VOCABULARY, size=3).tolist()
    first = _sample(scheduler, [prompt] * 4, images[:1], seed)
    prompts = [[*prompt, *sampled.output_ids, *tool] for sampled in first]
    second = _sample(scheduler, prompts, images[:2], seed + 100)
    records = []
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        record_id = f"train/0/q/{number}"
        turns = [
            make_turn(
                record_id,
                0,
                prompt,
                one.output_ids,
                logprobs=one.output_logprobs,
                temperature=TEMPERATURE,
            ),
            make_turn(
                record_id,
                1,
                tool,
                other.output_ids,
                parent=0,
                shared_len=len(prompt) + len(one.output_ids),
                logprobs=other.output_logprobs,
                temperature=TEMPERATURE,
            ),
        ]
        if images:
            turns = [
                turn.model_copy(
                    update={
                        "added_images": (str(place),),
                        "shared_images": place,
                        "image_placeholder": placeholder[0],
                        "image_processor": images[0].processor,
                    }
                )
                for place, turn in enumerate(turns)
            ]
        records.append(make_record(turns, float(number % 2), task_id="train/0/q", traj_id=number))
    book = ImageBook(
        {(str(place), processor_key(image.processor)): image for place, image in enumerate(images)}
    )
    return select_group(records, AlgorithmSection(), policy_version=0, seed=seed, images=book)


def _sample(
    scheduler: BatchScheduler, prompts: Sequence[list[int]], images: Sequence[ShownImage], seed: int
) -> list[TokenSequence]:
    sequences = []
    for number, prompt in enumerate(prompts):
        prompt_ids = np.array(prompt, dtype=np.int32)
        params = DrawParams(
            max_new_tokens=8,
            temperature=TEMPERATURE,
            seed=seed + number,
        )
        places = np.flatnonzero(prompt_ids == images[0].image_token_id).tolist() if images else []
        ids, placed = expanded(prompt_ids, list(zip(places, images, strict=True)))
        sequences.append(TokenSequence.start(f"{seed}/{number}", ids, params).showing(placed))
    scheduler.submit_all(sequences)
    while scheduler.has_work:
        scheduler.step()
    if any(image.image_token_id in one.output_ids for image in images for one in sequences):
        return _sample(scheduler, prompts, images, seed + 1000)  # it represents no image
    return sequences


@torch.no_grad()
def _difference(path: Path, group: SelectedGroup) -> float:
    """Largest difference between a group's logprobs and those of a trained checkpoint."""
    tree = TokenTree.from_tokens(group.turns)
    logprobs = target_logprobs(load_policy(path), tree.row).logprobs.numpy()
    turns = [turn for branch in tree.branches for turn in branch.turns]
    behavior = np.concatenate([turn.behavior_logprobs for turn in turns])
    return float(np.abs(logprobs - behavior).max())


def _line(name: str, figures: dict[str, Any]) -> str:
    numbers = " | ".join(f"{figures[key]:.1e}" for key in BOUNDS)
    answers = " | ".join("yes" if figures[key] else "NO" for key in ("export_equal", "rl_step"))
    return f"| {name} | {numbers} | {answers} |"


def _write_page(found: dict[str, dict[str, Any]]) -> None:
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    table = [
        "| family | trainer, float64 | trainer, float32 | engine | export | step |",
        "|---|---|---|---|---|---|",
        *(_line(name, figures) for name, figures in found.items()),
    ]
    PAGE.write_text("\n".join([f"{head}{BEGIN}", *table, f"{END}{tail}"]))


if __name__ == "__main__":
    sys.exit(main())

"""GRPO, MINIRL and CISPO as functions of a user, against the built-in ones: weights and time.

    python benchmarks/own_losses.py

The demo's model makes ten steps on random groups, packed as a run packs them, once with the built-in
loss and once with the user's copy of it (`examples/own_algorithm/built_in_losses.py`). Both learners
take turns step by step, and the order of the two changes with every step, so that both meet the same
machine. `equal_weights` counts the tensors that are equal bit for bit after the last step.
`cpu_ratio` is the median, over all steps but each learner's first, of the copy's processor seconds
over the built-in's.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness.processes import ROOT
from harness.random_groups import random_group
from harness.results import parser, report

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data.batch import StepBatch, build_step
from agentrl.distributed import Ranks
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

MODEL = ROOT / "assets/demo/model"
OWN = ROOT / "examples/own_algorithm/built_in_losses.py"
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({}, {}),
    "MINIRL": ({"importance_weight_truncation": 5.0}, {"truncation": 5.0}),
    "CISPO": ({}, {}),
}
"""Flags of the built-in loss, and arguments of the copy."""
VERSION = 3
ROUNDS_OF_TIME = 2
"""Passes over the ten steps, of which the first makes the weights that are compared."""


def batches(num_steps: int) -> list[StepBatch]:
    """Return the steps."""
    found = []
    for step in range(num_steps):
        rng = np.random.default_rng(step)
        groups = [
            random_group(rng, vocabulary=512, num_turns=8, task_id=f"random/{number}")
            for number in range(2)
        ]
        found.append(build_step(groups, policy_version=VERSION, token_budget=8192, num_ranks=1))
    return found


def learner(algorithm: AlgorithmSection) -> Learner:
    """Return a learner of the demo's model."""
    settings = LearnerSettings(
        weights=StartWeights(MODEL),
        model=ModelSection(model_name_or_path=str(MODEL)),
        trainer=TrainerSection(learning_rate=4e-4, warmup_steps=0),
        algorithm=algorithm,
        seed=0,
    )
    return Learner(settings, Ranks())


def step(of: Learner, batch: StepBatch) -> float:
    """Make a step, and return its processor seconds."""
    started = time.process_time()
    of.forward_backward(batch.micro_batches[0])
    of.optim_step()
    return time.process_time() - started


def compared(kind: str, steps: list[StepBatch]) -> dict[str, Any]:
    """Return the figures of one loss."""
    flags, arguments = LOSSES[kind]
    built_in = learner(AlgorithmSection(loss_calculator=kind, **flags))
    own = learner(AlgorithmSection(loss_calculator=f"{OWN}:{kind.lower()}", loss_args=arguments))
    start = {name: tensor.clone() for name, tensor in own.full_state().items()}
    ratios: list[float] = []
    states: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(len(steps) * ROUNDS_OF_TIME):
        pair = (built_in, own) if number % 2 else (own, built_in)
        seconds = {of: step(of, steps[number % len(steps)]) for of in pair}
        ratios.append(seconds[own] / seconds[built_in])
        if number == len(steps) - 1:
            states = {
                name: {key: tensor.clone() for key, tensor in of.full_state().items()}
                for name, of in (("built_in", built_in), ("own", own))
            }
    weights = states["built_in"]
    equal = sum(torch.equal(tensor, states["own"][name]) for name, tensor in weights.items())
    return {
        "steps": len(steps),
        "tensors": len(weights),
        "equal_weights": equal,
        "changed_by_training": sum(not torch.equal(weights[name], start[name]) for name in weights),
        "cpu_ratio": round(median(ratios[1:]), 4),
        "timed_steps": len(ratios) - 1,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all losses."""
    torch.set_num_threads(1)
    steps = batches(given.steps)
    return {"own": str(Path(OWN).relative_to(ROOT)), **{k: compared(k, steps) for k in LOSSES}}


def main() -> None:
    """Write the figures."""
    flags = parser(__doc__, "own_losses")
    flags.add_argument("--steps", type=int, default=10)
    report(flags, measure)


if __name__ == "__main__":
    main()

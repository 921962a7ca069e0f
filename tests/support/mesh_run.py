"""Three optimizer steps of a learner on a mesh of gloo ranks, for a test to look at.

    torchrun --nproc_per_node N tests/support/mesh_run.py MODELS OUTPUT JSON-LIST-OF-CASES

The steps have token trees, shares of unequal size, a share with nothing in it, and rows in chunks.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.tiny_vision import VISION_FAMILIES, shown_pictures
from harness.trees import random_group, routed_group

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data.batch import StepBatch, build_step
from agentrl.distributed import MeshShape, Ranks, joined_ranks
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

TRAINER = TrainerSection(learning_rate=1e-3, max_grad_norm=0.05, max_steps=8, warmup_steps=2)
ALGORITHM = AlgorithmSection(loss_calculator="GSPO", max_staleness=9)
STEPS = (
    # The groups of a step and the token budget of a pass: several rows a rank; one row in all, so
    # that the other shares have nothing; rows that are computed in chunks.
    ((0, 1, 2), 120),
    ((3,), 4096),
    ((4, 5), 17),
)


def step_batch(
    number: int, num_shares: int, *, routed: bool = False, vision: str | None = None
) -> StepBatch:
    seeds, token_budget = STEPS[number]
    if routed:  # as `write_moe_model` has them
        groups = [routed_group(seed, layers=3, experts=8) for seed in seeds]
    elif vision:  # every second group shows images, so that some ranks have none
        images = shown_pictures(vision)
        groups = [random_group(seed, images=() if seed % 2 else images) for seed in seeds]
    else:
        groups = [random_group(seed) for seed in seeds]
    return build_step(groups, policy_version=3, token_budget=token_budget, num_ranks=num_shares)


@dataclass(frozen=True)
class MeshCase:
    """A model, what is asked of its trainer, and the mesh that the ranks make."""

    architecture: str = "dense"
    """`dense`, `moe` or a family: the model of that name beside the others."""
    pp: int = 1
    dp_replicate: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    dtype: str = "float32"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    activation_offloading: bool = False
    torch_compile: bool = False
    routed: bool = False
    """With choices of experts to replay."""

    def shape(self, num_ranks: int) -> MeshShape:
        sizes = {name: getattr(self, name) for name in ("pp", "dp_replicate", "cp", "ep", "tp")}
        return MeshShape.of(num_ranks, **sizes)

    @property
    def bound(self) -> float:
        """How far anything may be from what one process computes."""
        return 1e-5 if self.dtype == "float32" else 1e-12

    @property
    def alone(self) -> "MeshCase":
        """What one process does for comparison."""
        return MeshCase(
            self.architecture, dtype=self.dtype, lora_rank=self.lora_rank, routed=self.routed
        )


def make_learner(models: Path, ranks: Ranks, case: MeshCase) -> Learner:
    model_path = models / case.architecture
    # With an adapter, also the reference policy that needs no second model.
    update = {"kl_coefficient": 0.1 if case.lora_rank else 0.0}
    targets = ModelSection().lora_target_modules
    settings = LearnerSettings(
        weights=StartWeights(model_path),
        model=ModelSection(
            model_name_or_path=str(model_path),
            torch_dtype=case.dtype,
            train_vision=True,
            lora_rank=case.lora_rank,
            lora_target_modules=targets[:4] if case.architecture == "moe" else targets,
        ),
        trainer=TRAINER.model_copy(
            update={
                "gradient_checkpointing": case.gradient_checkpointing,
                "cpu_offload": case.cpu_offload,
                "activation_offloading": case.activation_offloading,
                "torch_compile": case.torch_compile,
            }
        ),
        algorithm=ALGORITHM.model_copy(update=update),
        seed=1,
    )
    return Learner(settings, ranks)


def three_steps(models: Path, ranks: Ranks, case: MeshCase) -> dict[str, Any]:
    """Losses, gradient norms, logged means and (on rank 0) weights after the steps."""
    learner = make_learner(models, ranks, case)
    outcomes = []
    for number in range(len(STEPS)):
        vision = case.architecture if case.architecture in VISION_FAMILIES else None
        batch = step_batch(number, ranks.shape.dp_size, routed=case.routed, vision=vision)
        shares = batch.micro_batches
        learner.forward_backward(ranks.scatter(shares if ranks.is_main else None))
        outcomes.append(learner.optim_step(number))
    return {
        "losses": torch.tensor([outcome.loss for outcome in outcomes]),
        "grad_norms": torch.tensor([outcome.grad_norm for outcome in outcomes]),
        "entropies": torch.tensor([outcome.entropy for outcome in outcomes]),
        "num_targets": torch.tensor([outcome.num_targets for outcome in outcomes]),
        "num_turns": torch.tensor([len(outcome.ratios.turns) for outcome in outcomes]),
        "weights": learner.full_state(),
    }


def main() -> None:
    torch.set_num_threads(1)
    models, output = map(Path, sys.argv[1:3])
    with joined_ranks() as world:
        for number, described in enumerate(json.loads(sys.argv[3])):
            case = MeshCase(**described)
            shape = case.shape(world.world_size)
            ranks = Ranks(world.rank, world.world_size, world.local_rank, shape)
            found = three_steps(models, ranks, case)
            if ranks.is_main:
                torch.save(found, output / f"{number}.pt")


if __name__ == "__main__":
    main()

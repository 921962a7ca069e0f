"""Three optimizer steps of a learner on a mesh of gloo ranks, for a test to look at.

    torchrun --nproc_per_node N tests/support/mesh_run.py MODEL OUTPUT JSON-LIST-OF-SIZES

The steps have token trees, shares of unequal size, a share with nothing in it, and rows in chunks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.trees import random_group, routed_group

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data.batch import StepBatch, build_step
from agentrl.distributed import MeshShape, Ranks, joined_ranks
from agentrl.distributed.sharding import full_state_dict
from agentrl.trainer.learner import Learner
from agentrl.trainer.start import StartWeights

TRAINER = TrainerSection(learning_rate=1e-3, max_grad_norm=0.05, max_steps=8, warmup_steps=2)
ALGORITHM = AlgorithmSection(loss_calculator="GSPO", max_staleness=9)
STEPS = (
    # The groups of a step and the token budget of a pass: several rows a rank; one row in all, so
    # that the other shares have nothing; rows that are computed in chunks.
    ((0, 1, 2), 120),
    ((3,), 4096),
    ((4, 5), 17),
)


def step_batch(number: int, num_shares: int, *, routed: bool = False) -> StepBatch:
    seeds, token_budget = STEPS[number]
    if routed:  # as `write_moe_model` has them
        groups = [routed_group(seed, layers=3, experts=8) for seed in seeds]
    else:
        groups = [random_group(seed) for seed in seeds]
    return build_step(groups, policy_version=3, token_budget=token_budget, num_ranks=num_shares)


def make_learner(
    model_path: Path,
    ranks: Ranks,
    dtype: str = "float32",
    *,
    lora_rank: int = 0,
    **flags: Any,
) -> Learner:
    # With an adapter, also the reference policy that needs no second model.
    update = {"kl_coefficient": 0.1 if lora_rank else 0.0}
    return Learner(
        StartWeights(model_path),
        ranks=ranks,
        model=ModelSection(
            model_name_or_path=str(model_path), torch_dtype=dtype, lora_rank=lora_rank
        ),
        trainer=TRAINER.model_copy(update=flags),
        algorithm=ALGORITHM.model_copy(update=update),
        seed=1,
    )


def three_steps(
    model_path: Path, ranks: Ranks, dtype: str = "float32", *, routed: bool = False, **flags: Any
) -> dict[str, Any]:
    """Losses, gradient norms, logged means and (on rank 0) weights after the steps."""
    learner = make_learner(model_path, ranks, dtype, **flags)
    outcomes = []
    for number in range(len(STEPS)):
        shares = step_batch(number, ranks.shape.num_shares, routed=routed).micro_batches
        outcomes.append(learner.train(ranks.scatter(shares if ranks.is_main else None)))
    return {
        "losses": torch.tensor([outcome.loss for outcome in outcomes]),
        "grad_norms": torch.tensor([outcome.grad_norm for outcome in outcomes]),
        "entropies": torch.tensor([outcome.entropy for outcome in outcomes]),
        "num_terms": torch.tensor([outcome.num_terms for outcome in outcomes]),
        "num_turns": torch.tensor([len(outcome.ratios.turns) for outcome in outcomes]),
        "weights": full_state_dict(learner._policy, ranks),
    }


def main() -> None:
    torch.set_num_threads(1)
    model_path, output = map(Path, sys.argv[1:3])
    with joined_ranks() as world_ranks:
        for number, sizes in enumerate(json.loads(sys.argv[3])):
            dtype = sizes.pop("dtype", "float32")
            flags = {
                flag: sizes.pop(flag)
                for flag in ("gradient_checkpointing", "cpu_offload", "routed", "lora_rank")
                if flag in sizes
            }
            shape = MeshShape.of(world_ranks.world_size, **sizes)
            ranks = Ranks(world_ranks.rank, world_ranks.world_size, world_ranks.local_rank, shape)
            found = three_steps(model_path, ranks, dtype, **flags)
            if ranks.is_main:
                torch.save(found, output / f"{number}.pt")


if __name__ == "__main__":
    main()

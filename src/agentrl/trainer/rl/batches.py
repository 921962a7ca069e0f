"""From the groups of a step and the algorithm's flags to micro-batches."""

from collections.abc import Sequence

from agentrl.algorithms.reductions import reduction_kind
from agentrl.config.sections import AlgorithmSection
from agentrl.data import SelectedGroup, StepBatch, build_step, normalized_over_step
from agentrl.data.tree import Merge


def step_batch(
    groups: Sequence[SelectedGroup],
    algorithm: AlgorithmSection,
    *,
    policy_version: int,
    token_budget: int,
    merge: Merge,
    num_ranks: int = 1,
    pair_cost: float = 0.0,
) -> StepBatch:
    """Merge, weigh and pack the groups of one optimizer step as the algorithm has it.

    Args:
        groups: of the step.
        algorithm: decides how loss terms are averaged and advantages normalized.
        policy_version: version of the weights that the step starts from.
        token_budget: tokens of one forward pass.
        merge: prefix sharing in the forward pass.
        num_ranks: data-parallel ranks.
        pair_cost: see `build_step`.
    """
    if algorithm.advantage_estimator == "reinforce_plus_plus":
        groups = normalized_over_step(groups)
    return build_step(
        groups,
        policy_version=policy_version,
        token_budget=token_budget,
        reduction=reduction_kind(
            token_level_loss=algorithm.token_level_loss,
            skip_length_normalization=algorithm.skip_length_normalization,
        ),
        merge=merge,
        num_ranks=num_ranks,
        pair_cost=pair_cost,
        normalizer_length=algorithm.loss_normalizer_length,
    )

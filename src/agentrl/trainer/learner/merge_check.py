"""Checks merged training inside a run (`verify_merge`): a step's gradient in two packings.

Separate turns go through transformers' own model, one per forward pass: no code for token trees is on
both sides.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from agentrl.data import MicroBatch
from agentrl.distributed import Ranks, Stages, squared_norms
from agentrl.models.attention.attention_registry import (
    with_own_attention,
)
from agentrl.models.policy import PolicyModel

STEP_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.04}
"""Relative gradient error, by compute precision, beyond which a training step counts as wrong.

The mildest known bug of merged training changes a gradient by 0.044."""
_NUM_WORST_PARAMETERS = 5


@dataclass(frozen=True)
class MergeCheck:
    """The error of the gradient of merged turns against that of separate turns."""

    relative_error: float
    """Norm of the difference over the norm of the separate gradient."""
    tolerance: float
    loss_merged: float
    loss_separate: float
    worst: tuple[tuple[str, float], ...]
    """Parameters with the largest individual relative errors."""

    @property
    def is_equal(self) -> bool:
        """Whether the error is within the tolerance (NaN is not)."""
        return self.relative_error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"equal": self.is_equal, **asdict(self), "worst": dict(self.worst)}


Accumulate = Callable[[Sequence[MicroBatch]], float]
"""Adds the gradients of micro-batches to the parameters and returns their share of the loss."""


def check_merge(
    policy: PolicyModel,
    merged: Sequence[MicroBatch],
    separate: Sequence[MicroBatch],
    *,
    accumulate: Accumulate,
    tolerance: float,
    ranks: Ranks,
    stages: Stages | None = None,
) -> MergeCheck:
    """Compare the gradients of two packings of one step (collective); leaves no gradient behind.

    Args:
        policy: the model whose parameters are compared, sharded or not.
        merged: this rank's micro-batches as used in training.
        separate: this rank's micro-batches of the same turns, one per row.
        accumulate: the trainer's forward and backward pass.
        tolerance: largest relative error that counts as equal.
        ranks: all ranks that share the step.
        stages: the stages of the pipeline, if the policy is one of them; the worst parameters are then
            those of the first stage.
    """
    merged_loss, gradients = _gradients(policy, merged, accumulate)
    # If the ranks of a row see only some of its tokens, AgentRL's layers exchange the others, which
    # transformers' own layers cannot.
    with nullcontext() if policy.split.is_followed else with_own_attention(policy.model):
        separate_loss, expected = _gradients(policy, separate, accumulate)
    names = [name for name, trained in policy.named_parameters() if trained.requires_grad]
    # A tied head counts as the embedding that it shares.
    is_counted = [policy.stage.number == 0 or not policy.stage.is_tied(name) for name in names]
    pairs = zip(gradients, expected, strict=True)
    differences = squared_norms([one - other for one, other in pairs])
    norms = squared_norms(expected)
    merged_loss, separate_loss = ranks.sum([merged_loss, separate_loss])
    totals = [sum(compress(squares, is_counted)) for squares in (differences, norms)]
    if stages is not None:
        totals = stages.sum(totals)
    errors = {
        name: _relative_error(difference, norm)
        for name, difference, norm in zip(names, differences, norms, strict=True)
    }
    return MergeCheck(
        relative_error=_relative_error(*totals),
        tolerance=tolerance,
        loss_merged=merged_loss,
        loss_separate=separate_loss,
        worst=tuple(sorted(errors.items(), key=lambda item: -item[1])[:_NUM_WORST_PARAMETERS]),
    )


def _gradients(
    policy: nn.Module, batches: Sequence[MicroBatch], accumulate: Accumulate
) -> tuple[float, list[torch.Tensor]]:
    policy.zero_grad(set_to_none=True)
    loss = accumulate(batches)
    gradients = []
    for parameter in policy.parameters():
        if parameter.requires_grad:
            # Some families have parameters that the forward pass does not use.
            gradient = parameter.grad
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
    policy.zero_grad(set_to_none=True)
    return loss, gradients


def _relative_error(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)

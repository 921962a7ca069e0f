"""The policy losses of `--loss_calculator`; `losses.policy_loss` has their formulas and sources.

Each is written as a user's own would be.
"""

import torch

from agentrl.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossSettings,
    TargetLosses,
    bounded_log_ratio,
    inside_drop_range,
    plain_losses,
    sequence_sums,
)


@LOSSES.register("GRPO")
def grpo_loss(inputs: LossInputs) -> TargetLosses:
    """Return the clipped surrogate of GRPO and DAPO, dual-clipped or with CE-GPPO's gradients."""
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp()
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, inputs.settings)
    loss = _with_clipped_gradients(
        loss, inputs.policy_logprobs, ratio, inputs.advantages, inputs.settings
    )
    return TargetLosses(loss, inside_drop_range(inputs), inputs.behavior_ratio, clipped)


@LOSSES.register("MINIRL")
def minirl_loss(inputs: LossInputs) -> TargetLosses:
    """Return REINFORCE with a truncated importance weight and a drop range."""
    weights = inputs.behavior_ratio
    clipped = torch.zeros_like(weights, dtype=torch.bool)
    truncation = inputs.settings.importance_weight_truncation
    if truncation is not None:
        clipped = weights > truncation
        weights = weights.clamp(max=truncation)
    loss = -weights * inputs.advantages * inputs.policy_logprobs
    return TargetLosses(loss, inside_drop_range(inputs), inputs.behavior_ratio, clipped)


@LOSSES.register("GSPO")
def gspo_loss(inputs: LossInputs) -> TargetLosses:
    """Return the clipped surrogate with one ratio for each turn."""
    log_ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).detach()
    turn_ratio = sequence_sums(log_ratio, inputs.turns, mean=True).exp()
    surrogate = turn_ratio * (inputs.policy_logprobs - inputs.policy_logprobs.detach()).exp()
    loss, clipped = _clipped_surrogate(surrogate, inputs.advantages, inputs.settings)
    return TargetLosses(loss, torch.ones_like(clipped), inputs.behavior_ratio, clipped)


@LOSSES.register("CISPO")
def cispo_loss(inputs: LossInputs) -> TargetLosses:
    """Return REINFORCE with an importance weight that is clipped from above."""
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp().detach()
    _, upper = inputs.settings.clip_range
    clipped = ratio > upper
    loss = -ratio.clamp(max=upper) * inputs.advantages * inputs.policy_logprobs
    return TargetLosses(loss, torch.ones_like(clipped), inputs.behavior_ratio, clipped)


@LOSSES.register("REINFORCE")
def reinforce_loss(inputs: LossInputs) -> TargetLosses:
    """Return `-A * log pi`."""
    return plain_losses(inputs, -inputs.advantages * inputs.policy_logprobs)


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `-min(r*A, clip(r)*A)`, dual-clipped, and where the clipped term was taken."""
    unclipped = ratio * advantages
    clipped_term = ratio.clamp(*settings.clip_range) * advantages
    objective, clipped = (
        torch.minimum(unclipped, clipped_term),
        clipped_term.detach() < unclipped.detach(),
    )
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        is_floored = (advantages < 0) & (objective.detach() < floor)
        objective = torch.where(is_floored, floor, objective)
        clipped = clipped | is_floored
    return -objective, clipped


def _with_clipped_gradients(
    loss: torch.Tensor,
    policy_logprobs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    """Return the loss with the bounded gradients of CE-GPPO (2509.20712) for clipped tokens."""
    lower, upper = settings.clip_range
    # r / sg(r): its value is 1 and its gradient that of log pi. This form is finite for any r.
    unit = (policy_logprobs - policy_logprobs.detach()).exp()
    if settings.beta1 is not None:
        below = (ratio.detach() < lower) & (advantages < 0)
        loss = torch.where(below, -settings.beta1 * lower * unit * advantages, loss)
    if settings.beta2 is not None:
        above = (ratio.detach() > upper) & (advantages > 0)
        loss = torch.where(above, -settings.beta2 * upper * unit * advantages, loss)
    return loss

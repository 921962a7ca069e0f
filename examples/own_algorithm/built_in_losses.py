"""GRPO, MINIRL and CISPO as functions of one's own, to begin from: the same gradients, bit for bit.

agentrl run ... --loss_calculator examples/own_algorithm/built_in_losses.py:grpo
"""

import torch

from agentrl.algorithms.losses import LossInputs, TargetLosses, bounded_log_ratio, inside_drop_range


def grpo(inputs: LossInputs) -> TargetLosses:
    """Return `-min(r * A, clip(r) * A)`, with the clip range of the flags."""
    advantages = inputs.advantages
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp()
    plain, bounded = ratio * advantages, ratio.clamp(*inputs.settings.clip_range) * advantages
    return TargetLosses(
        loss=-torch.minimum(plain, bounded),
        keep=inside_drop_range(inputs),
        ratio=inputs.behavior_ratio,
        clipped=bounded.detach() < plain.detach(),
    )


def minirl(inputs: LossInputs, *, truncation: float = 5.0) -> TargetLosses:
    """Return `-min(w, truncation) * A * log pi`, with `w` the ratio to the sampler's policy."""
    weight = bounded_log_ratio(inputs.policy_logprobs, inputs.behavior).exp().detach()
    return TargetLosses(
        loss=-weight.clamp(max=truncation) * inputs.advantages * inputs.policy_logprobs,
        keep=inside_drop_range(inputs),
        ratio=weight,
        clipped=weight > truncation,
    )


def cispo(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return `-min(r, upper) * A * log pi`, and the mean weight as a figure."""
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp().detach()
    _, upper = inputs.settings.clip_range
    weight = ratio.clamp(max=upper)
    return -weight * inputs.advantages * inputs.policy_logprobs, {"weight": weight}

"""On-policy distillation as a loss, with a bounded teacher and a figure that shows it being followed.

agentrl run ... --teachers big --loss_calculator examples/own_algorithm/distillation.py:distilled
agentrl teach RUN --teacher big=/models/big

`--advantage_estimator opd` is the same without the bound. Here rewards stay part of the loss, and a
token that the teacher finds absurd cannot outweigh the rest of its step.
"""

import torch

from agentrl.algorithms.losses import LossInputs, bounded_log_ratio


def distilled(
    inputs: LossInputs, *, weight: float = 0.8, bound: float = 3.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return `-r * A` with `A = (1 - weight) * A_reward + weight * A_teacher`, and the reverse KL.

    Args:
        inputs: N target tokens, with the logprobs of one or several teachers.
        weight: share of the teachers.
        bound: largest magnitude of A_teacher, in nats.
    """
    assert inputs.teacher_logprobs is not None, "give --teachers"
    teacher = inputs.teacher_logprobs.mean(dim=1)
    policy = inputs.policy_logprobs.detach()
    of_teacher = (teacher - policy).clamp(-bound, bound)
    advantages = (1.0 - weight) * inputs.advantages + weight * of_teacher
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.behavior).exp()
    return -ratio * advantages, {"reverse_kl": policy - teacher}

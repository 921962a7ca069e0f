"""SAPO (arXiv 2511.20347): a smooth gate on the importance ratio in place of a clip range.

agentrl run ... --loss_calculator examples/own_algorithm/sapo.py:sapo --loss_args '{"negative": 1.1}'
"""

import torch

from agentrl.algorithms.losses import LossInputs, bounded_log_ratio


def sapo(
    inputs: LossInputs, *, positive: float = 1.0, negative: float = 1.05
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return `-f(r) * A` with `f(r) = sigmoid(tau * (r - 1)) * 4 / tau`, and the share of the gradient.

    Args:
        inputs: N target tokens.
        positive: tau of tokens with a positive advantage.
        negative: tau of all others; larger, because their gradients spread over the vocabulary.
    """
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp()
    tau = torch.where(inputs.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = -gate * (4.0 / tau) * inputs.advantages
    return loss, {"gradient_share": 4.0 * gate * (1.0 - gate)}

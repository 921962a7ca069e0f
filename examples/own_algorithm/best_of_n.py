"""Best-of-n: fine-tuning on the best of each question's rollouts (RAFT, arXiv 2304.06767).

The best rollout of a group gets the advantage 1 and all others 0, so only its turns are trained on;
the loss is their negative log-likelihood. The rollouts come from the policy itself, which sharpens
what it can already do sometimes. Nothing below `ENOUGH` is worth repeating.

agentrl run ... --sign_clip false \
    --advantage_estimator examples/own_algorithm/best_of_n.py:best \
    --loss_calculator examples/own_algorithm/best_of_n.py:likelihood
"""

import numpy as np
import torch

from agentrl.algorithms.advantages import ComparedRewards
from agentrl.algorithms.losses import LossInputs

ENOUGH = 0.5


def best(compared: ComparedRewards) -> np.ndarray:
    """Return 1 for the first of the best rewards and 0 for the others, float64 [n]."""
    advantages = np.zeros(len(compared.rewards))
    winner = int(np.argmax(compared.rewards))
    if compared.rewards[winner] > ENOUGH:
        advantages[winner] = 1.0
    return advantages


def likelihood(inputs: LossInputs) -> torch.Tensor:
    """Return `-A * log pi` of each target token."""
    return -inputs.advantages * inputs.policy_logprobs

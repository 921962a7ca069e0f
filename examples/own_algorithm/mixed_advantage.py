"""A mixture of two advantages: half of GRPO's, half of RLOO's.

GRPO divides by the group's standard deviation, so a group of nearly equal rewards weighs as much as a
group of different ones; with the mixture it weighs less, but still counts.

agentrl run ... --advantage_estimator examples/own_algorithm/mixed_advantage.py:mixed
"""

import numpy as np

from agentrl.algorithms.advantages import ComparedRewards, group_std, leave_one_out

SHARE = 0.5


def mixed(compared: ComparedRewards) -> np.ndarray:
    """Return one advantage for each reward, float64 [n]."""
    return SHARE * group_std(compared) + (1.0 - SHARE) * leave_one_out(compared)

"""Names of the formulas that flags choose and `agentrl.algorithms` implements.

They are defined here because flags and formulas both need them, and configuration is a layer below
algorithms.
"""

from typing import Literal, get_args

LossKind = Literal["GRPO", "MINIRL", "GSPO", "CISPO", "REINFORCE"]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
"""Policy losses, see `algorithms.losses`."""

AdvantageKind = Literal[
    "leave_one_out",
    "group_mean",
    "group_std",
    "reinforce_plus_plus",
    "tree_grpo",
    "vine",
    "arpo",
    "opd",
]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)
"""Baselines within a group, see `algorithms.advantages` and, of trees, `algorithms.tree_credit`."""
OPD: AdvantageKind = "opd"
"""The estimator of teachers alone."""

RATE_SCHEDULES = ("constant", "linear", "cosine")
"""Learning rates after the warm-up, see `trainer.learner.optimizer`."""

ProximalKind = Literal["behavior", "recompute", "loglinear"]
CorrectionKind = Literal["none", "full", "tis", "icepop", "mis"]
CorrectionLevel = Literal["token", "sequence", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3"]
"""Policies and weights of off-policy samples, and the penalty, see `algorithms.losses`."""
